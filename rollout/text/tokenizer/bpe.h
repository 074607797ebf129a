// Byte pair encoding: a word becomes its characters (or bytes); then, as long as two neighbours
// have a merge, the merge of the lowest rank is made, the leftmost of equal ones. Results for words
// are cached.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/tokenizer/flat_maps.h"
#include "rollout/text/tokenizer/tokenizer_file.h"

namespace ferry::rollout::text {

// GPT-2's character for a byte in the vocabulary of a byte-level model (printable ASCII is itself),
// and the inverse, -1 for any other character.
char32_t character_of_byte(unsigned char byte);
int byte_of_character(char32_t c);
// Writes the bytes of a token of such a vocabulary. False if it has other characters.
bool bytes_of_token(std::string_view token, std::string& bytes);

class Bpe {
 public:
  // `byte_level`: words are bytes, see PreTokenizer::byte_level. Throws Error that names a
  // contradiction in the file, or an unsupported setting. Takes the vocabulary out of `file`.
  Bpe(TokenizerFile& file, bool byte_level);
  Bpe(const Bpe&) = delete;  // the tables refer to the tokens
  Bpe& operator=(const Bpe&) = delete;

  // The memory and cache of encoding, for one thread at a time.
  class Scratch;

  // Appends the tokens of `word`, valid UTF-8.
  void encode(std::string_view word, Scratch& scratch, std::vector<TokenId>& ids) const;

  std::size_t size() const { return size_; }
  TokenId id_of(std::string_view token) const { return ids_.find(token); }  // or kNoToken
  // Null if no token of the vocabulary has this id.
  const std::string* token_of(TokenId id) const;

 private:
  void read_vocabulary(TokenizerFile& file);
  void read_merges(const TokenizerFile& file);
  void read_alphabet();
  void encode_cached(std::string_view word, Scratch& scratch, std::vector<TokenId>& ids) const;
  void encode_anew(std::string_view word, Scratch& scratch, std::vector<TokenId>& ids) const;
  void find_symbols(std::string_view word, std::vector<TokenId>& symbols) const;
  void merge_short(std::vector<TokenId>& symbols, Scratch& scratch) const;
  void merge_long(std::vector<TokenId>& symbols, Scratch& scratch) const;
  TokenId id_of_character(char32_t c) const {
    return c < character_ids_.size() ? character_ids_[c] : kNoToken;
  }

  std::string source_;
  bool byte_level_ = false;
  bool byte_fallback_ = false;
  bool fuse_unk_ = false;
  bool ignore_merges_ = false;
  TokenId unknown_ = kNoToken;
  bool has_unknown_ = false;

  std::size_t size_ = 0;
  std::vector<std::string> tokens_;  // by id
  std::vector<bool> taken_;          // by id
  TokenTable ids_;
  std::vector<std::string> words_;  // byte-level models with ignore_merges: tokens as bytes, by id
  TokenTable word_ids_;
  MergeTable merges_;
  std::array<TokenId, 256> byte_ids_{};  // byte-level models: of bytes; others: of "<0x0A>"
  std::vector<TokenId> character_ids_;   // other models, by character
  PairFilter inner_pairs_;               // neighbours inside tokens that merges make
};

class Bpe::Scratch {
 public:
  Scratch() : slots_(kSlots) {}

 private:
  friend class Bpe;

  // A word and its tokens in one line of the processor's cache.
  struct Slot {
    static constexpr std::size_t kLongestWord = 30, kMostTokens = 8;
    std::uint8_t word_size = 0;  // zero: empty
    std::uint8_t num_tokens = 0;
    std::array<char, kLongestWord> word{};
    std::array<TokenId, kMostTokens> tokens{};
  };
  static_assert(sizeof(Slot) == 64);
  static constexpr std::size_t kSlots = 1 << 15;

  std::vector<Slot> slots_;
  std::vector<TokenId> symbols_;
  std::vector<std::uint32_t> ranks_;
  std::vector<std::uint64_t> queue_;
  std::vector<std::int32_t> previous_, next_;
};

}  // namespace ferry::rollout::text
