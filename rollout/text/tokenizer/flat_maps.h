// The three hash tables of encoding, each with open addressing in one array.
#pragma once

#include <bit>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "rollout/text/tokenizer/tokenizer_file.h"

namespace ferry::rollout::text {

inline std::uint64_t mixed(std::uint64_t key) {
  key *= 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio
  return key ^ key >> 32;
}

// (left, right) -> the merge of the two.
class MergeTable {
 public:
  struct Merge {
    std::uint32_t rank = 0;
    TokenId id = kNoToken;
  };
  static constexpr std::uint32_t kNoRank = 0xFFFFFFFF;

  explicit MergeTable(std::size_t count = 0)
      : slots_(std::bit_ceil(count * 3 / 2 + 2)), mask_(slots_.size() - 1) {}

  void set(TokenId left, TokenId right, Merge merge) {
    auto& slot = slots_[index_of(key_of(left, right))];
    slot = {.key = key_of(left, right), .merge = merge};
  }
  // Returns rank kNoRank if there is none.
  Merge find(TokenId left, TokenId right) const {
    return slots_[index_of(key_of(left, right))].merge;
  }

 private:
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  struct Slot {
    std::uint64_t key = kEmpty;
    Merge merge{.rank = kNoRank};
  };

  static std::uint64_t key_of(TokenId left, TokenId right) {
    return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 |
           static_cast<std::uint32_t>(right);
  }
  std::size_t index_of(std::uint64_t key) const {
    auto index = mixed(key) & mask_;
    while (slots_[index].key != key && slots_[index].key != kEmpty) index = (index + 1) & mask_;
    return index;
  }

  std::vector<Slot> slots_;
  std::size_t mask_;
};

// Text -> id. The caller owns the texts, which must not move.
class TokenTable {
 public:
  explicit TokenTable(std::size_t count = 0)
      : slots_(std::bit_ceil(count * 2 + 2)), mask_(slots_.size() - 1) {}

  // Returns false if the text is there already.
  bool insert(std::string_view text, TokenId id) {
    auto& slot = slots_[index_of(text)];
    if (slot.id != kNoToken) return false;
    slot = {.text = text, .id = id};
    return true;
  }
  TokenId find(std::string_view text) const { return slots_[index_of(text)].id; }

 private:
  struct Slot {
    std::string_view text{};
    TokenId id = kNoToken;
  };

  std::size_t index_of(std::string_view text) const {
    auto index = mixed(std::hash<std::string_view>()(text)) & mask_;
    while (slots_[index].id != kNoToken && slots_[index].text != text) index = (index + 1) & mask_;
    return index;
  }

  std::vector<Slot> slots_;
  std::size_t mask_;
};

// A set of pairs with false positives but no false negatives.
class PairFilter {
 public:
  explicit PairFilter(std::size_t count = 0)
      : bits_(std::bit_ceil(count / 4 + 1)), mask_(bits_.size() * 64 - 1) {}

  void insert(char32_t first, char32_t second) {
    const auto bit = index_of(first, second);
    bits_[bit >> 6] |= std::uint64_t{1} << (bit & 63);
  }
  bool may_contain(char32_t first, char32_t second) const {
    const auto bit = index_of(first, second);
    return (bits_[bit >> 6] >> (bit & 63) & 1) != 0;
  }

 private:
  std::size_t index_of(char32_t first, char32_t second) const {
    return mixed(std::uint64_t{first} << 32 | second) & mask_;
  }

  std::vector<std::uint64_t> bits_;
  std::size_t mask_;
};

}  // namespace ferry::rollout::text
