#include "rollout/grammar/vocabulary.h"

#include <algorithm>
#include <numeric>

namespace ferry::rollout::grammar {
namespace {

constexpr std::size_t kLongestToken = 4096;  // bytes; a longer one is never drawn

}  // namespace

Vocabulary::Vocabulary(const text::Tokenizer& tokenizer, std::int64_t size)
    : size_(size), bytes_(tokenizer.token_bytes(static_cast<std::size_t>(size), kAddedToken)) {
  for (std::int64_t i = 0; i < size; ++i) {
    const auto length = bytes_of(i).size();
    if (length > 0 && length <= kLongestToken) tokens_.push_back(static_cast<std::int32_t>(i));
  }
  std::ranges::stable_sort(tokens_, {},
                           [&](std::int32_t token) { return std::string_view(bytes_of(token)); });
  std::vector<std::uint32_t> path;  // of nodes to the last token's
  std::string_view last;
  for (std::size_t i = 0; i < tokens_.size(); ++i) {
    const std::string_view bytes = bytes_of(tokens_[i]);
    std::size_t same = 0;
    while (same < std::min(bytes.size(), last.size()) && bytes[same] == last[same]) ++same;
    const auto close = [&](std::size_t depth) {
      for (; path.size() > depth; path.pop_back())
        nodes_[path.back()].end = static_cast<std::uint32_t>(nodes_.size());
    };
    close(same);
    for (auto depth = same; depth < bytes.size(); ++depth) {
      path.push_back(static_cast<std::uint32_t>(nodes_.size()));
      nodes_.push_back({.first_token = static_cast<std::uint32_t>(i),
                        .depth = static_cast<std::uint16_t>(depth),
                        .byte = static_cast<std::uint8_t>(bytes[depth])});
    }
    ++nodes_[path.back()].num_tokens;
    max_depth_ = std::max(max_depth_, bytes.size());
    last = bytes;
  }
  for (const auto node : path) nodes_[node].end = static_cast<std::uint32_t>(nodes_.size());
}

}  // namespace ferry::rollout::grammar
