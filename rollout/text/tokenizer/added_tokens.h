// The added tokens of a tokenizer.json: texts that are found first, and become one token each.
// Tokens with `normalized` are found in the normalized text, the others in the original one.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "rollout/text/tokenizer/bpe.h"
#include "rollout/text/tokenizer/normalizer.h"
#include "rollout/text/tokenizer/tokenizer_file.h"

namespace ferry::rollout::text {

struct AddedToken {
  TokenId id = kNoToken;
  std::string content{};
  bool single_word = false;  // not found inside a word
  bool lstrip = false;       // includes the white space on its left
  bool rstrip = false;       // includes the white space on its right
  bool normalized = false;
  bool special = false;
  std::string written{};  // its spelling in texts: normalized if `normalized`
};

class AddedTokens {
 public:
  // Throws Error(kCorrupt) if the file's ids are not those that the package would assign.
  AddedTokens(const TokenizerFile& file, const Bpe& model, const Normalizer& normalizer);

  const std::vector<AddedToken>& tokens() const { return tokens_; }
  const AddedToken* find(std::string_view content) const;
  const AddedToken* find(TokenId id) const;
  bool is_special(std::string_view token) const { return special_.contains(std::string(token)); }

  // A part of a text: an added token, or (kNoToken) the text between two.
  struct Stretch {
    std::size_t begin = 0;
    std::size_t end = 0;
    TokenId id = kNoToken;
  };
  bool any(bool normalized) const { return finder(normalized).any(); }
  // Appends the stretches of `text`; only a token's may be empty.
  void split(std::string_view text, bool normalized, std::vector<Stretch>& into) const;

 private:
  // Finds the longest text that begins at a place: a tree of bytes.
  class Finder {
   public:
    void insert(std::string_view text, std::uint32_t index);
    bool any() const { return !nodes_.empty(); }
    // (end, index) of the longest text that begins at `at`; end == at if there is none.
    std::pair<std::size_t, std::uint32_t> longest_at(std::string_view text, std::size_t at) const;
    bool may_begin(char byte) const { return begins_[static_cast<unsigned char>(byte)]; }

   private:
    static constexpr std::uint32_t kNone = 0xFFFFFFFF;
    struct Node {
      std::uint32_t index = kNone;
      std::vector<std::pair<char, std::uint32_t>> children{};
    };
    std::vector<Node> nodes_;
    std::array<bool, 256> begins_{};
  };
  const Finder& finder(bool normalized) const { return normalized ? normalized_ : plain_; }

  std::vector<AddedToken> tokens_;
  std::unordered_map<std::string, std::uint32_t> by_content_;
  std::unordered_map<TokenId, std::uint32_t> by_id_;
  std::unordered_map<std::string, bool> special_;
  Finder plain_, normalized_;
};

}  // namespace ferry::rollout::text
