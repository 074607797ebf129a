// Byte pair encoding: a word becomes its characters (or bytes), and then, as long as two neighbours
// have a merge, the best merge of all is made, the leftmost of equals. Words that come again are
// remembered.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/tokenizer/flat_maps.h"
#include "rollout/text/tokenizer/tokenizer_file.h"

namespace ferry::rollout::text {

// The character that stands for a byte in the vocabulary of a byte-level model, as GPT-2 has it:
// printable ones stand for themselves. And back; -1 for a character that is none of those.
char32_t character_of_byte(unsigned char byte);
int byte_of_character(char32_t c);
// The bytes that a token of such a vocabulary stands for. False: it has other characters.
bool bytes_of_token(std::string_view token, std::string& bytes);

class Bpe {
 public:
  // `byte_level`: words are bytes, see PreTokenizer::byte_level. Throws Error that names what the
  // file contradicts itself in, or what is not supported.
  Bpe(TokenizerFile& file, bool byte_level);
  Bpe(const Bpe&) = delete;  // the tables refer to the tokens
  Bpe& operator=(const Bpe&) = delete;

  // What encoding needs and remembers: one for each thread.
  class Scratch;

  // Appends the tokens of `word`, valid UTF-8.
  void encode(std::string_view word, Scratch& scratch, std::vector<TokenId>& ids) const;

  std::size_t size() const { return size_; }
  TokenId id_of(std::string_view token) const { return ids_.find(token); }  // or kNoToken
  // Where ids end; not all before need be taken.
  TokenId id_end() const { return static_cast<TokenId>(tokens_.size()); }
  // Nothing: no token of the vocabulary has this id.
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
  std::vector<std::string> words_;  // ignore_merges of a byte-level model: tokens as bytes, by id
  TokenTable word_ids_;
  MergeTable merges_;
  std::array<TokenId, 256> byte_ids_{};  // of a byte-level model, or of "<0x0A>"
  std::vector<TokenId> character_ids_;   // of other models, by character
  PairFilter inner_pairs_;               // neighbours inside of tokens that merges make
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
