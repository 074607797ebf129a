// A vocabulary as bytes: the tokens in a tree, in which those that may come next are found in one
// walk.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "rollout/text/tokenizer/tokenizer.h"

namespace ferry::rollout::grammar {

// Stands before an added token's text, in texts of the grammar and in the tree: bytes of other
// tokens do not write it, since it is no UTF-8.
inline constexpr char kAddedToken = '\xFF';

class Vocabulary {
 public:
  // `size`: of the model's vocabulary, at most as many tokens as ids below it.
  Vocabulary(const text::Tokenizer& tokenizer, std::int64_t size);

  std::int64_t size() const { return size_; }
  // Added tokens have kAddedToken in front; ids without text are empty.
  const std::string& bytes_of(std::int64_t token) const {
    return bytes_[static_cast<std::size_t>(token)];
  }

  // The tree in the order of a walk: children follow their parent.
  struct Node {
    std::uint32_t end = 0;          // the first node that is not below this one
    std::uint32_t first_token = 0;  // of tokens()
    std::uint16_t num_tokens = 0;   // that end here
    std::uint16_t depth = 0;        // from 0
    std::uint8_t byte = 0;
  };
  std::span<const Node> nodes() const { return nodes_; }
  std::span<const std::int32_t> tokens() const { return tokens_; }
  std::size_t max_depth() const { return max_depth_; }

 private:
  std::int64_t size_;
  std::vector<std::string> bytes_;
  std::vector<Node> nodes_;
  std::vector<std::int32_t> tokens_;
  std::size_t max_depth_ = 0;
};

}  // namespace ferry::rollout::grammar
