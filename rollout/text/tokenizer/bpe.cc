#include "rollout/text/tokenizer/bpe.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "distckpt/base/error.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {
namespace {

constexpr std::size_t kShortWord = 48;  // symbols; a queue is faster above

std::uint64_t hash_of(std::string_view word) {
  std::uint64_t hash = word.size();
  std::size_t at = 0;
  for (; at + 8 <= word.size(); at += 8) {
    std::uint64_t part = 0;
    std::memcpy(&part, word.data() + at, 8);
    hash = mixed(hash ^ part);
  }
  std::uint64_t rest = 0;
  std::memcpy(&rest, word.data() + at, word.size() - at);
  return mixed(mixed(hash ^ rest));
}

}  // namespace

void Bpe::encode(std::string_view word, Scratch& scratch, std::vector<TokenId>& ids) const {
  if (byte_level_ || ignore_merges_) return encode_cached(word, scratch, ids);
  // If no merge makes a token that contains two characters side by side, then no merge ever crosses
  // the boundary between them: the two sides are words of their own.
  std::size_t begin = 0;
  char32_t last = 0;
  bool last_known = false;
  for (std::size_t at = 0; at < word.size();) {
    const auto here = at;
    const auto c = next_code_point(word, at);
    const bool known = id_of_character(c) != kNoToken;  // unknown ones may have to be fused
    if (known && last_known && !inner_pairs_.may_contain(last, c)) {
      encode_cached(word.substr(begin, here - begin), scratch, ids);
      begin = here;
    }
    last = c;
    last_known = known;
  }
  encode_cached(word.substr(begin), scratch, ids);
}

void Bpe::encode_cached(std::string_view word, Scratch& scratch, std::vector<TokenId>& ids) const {
  using Slot = Scratch::Slot;
  if (word.empty()) return;
  if (word.size() > Slot::kLongestWord) return encode_anew(word, scratch, ids);
  auto& slot = scratch.slots_[hash_of(word) & (Scratch::kSlots - 1)];
  if (std::string_view(slot.word.data(), slot.word_size) == word) {
    ids.insert(ids.end(), slot.tokens.begin(), slot.tokens.begin() + slot.num_tokens);
    return;
  }
  const auto before = ids.size();
  encode_anew(word, scratch, ids);
  const auto count = ids.size() - before;
  if (count > Slot::kMostTokens) return;
  slot.word_size = static_cast<std::uint8_t>(word.size());
  slot.num_tokens = static_cast<std::uint8_t>(count);
  std::ranges::copy(word, slot.word.begin());
  std::copy_n(ids.begin() + static_cast<std::ptrdiff_t>(before), count, slot.tokens.begin());
}

void Bpe::encode_anew(std::string_view word, Scratch& scratch, std::vector<TokenId>& ids) const {
  if (ignore_merges_) {
    const auto id = byte_level_ ? word_ids_.find(word) : ids_.find(word);
    if (id != kNoToken) {
      ids.push_back(id);
      return;
    }
  }
  auto& symbols = scratch.symbols_;
  symbols.clear();
  find_symbols(word, symbols);
  if (symbols.size() > kShortWord) {
    merge_long(symbols, scratch);
  } else {
    merge_short(symbols, scratch);
  }
  ids.insert(ids.end(), symbols.begin(), symbols.end());
}

void Bpe::find_symbols(std::string_view word, std::vector<TokenId>& symbols) const {
  bool pending = false;  // an unknown token that may be fused with the next one
  for (std::size_t at = 0; at < word.size();) {
    const auto begin = at;
    TokenId id = kNoToken;
    if (byte_level_) {
      id = byte_ids_[static_cast<unsigned char>(word[at++])];
    } else {
      id = id_of_character(next_code_point(word, at));
    }
    if (id != kNoToken) {
      if (pending) symbols.push_back(unknown_);
      pending = false;
      symbols.push_back(id);
      continue;
    }
    if (byte_fallback_) {
      const auto bytes = word.substr(begin, at - begin);
      const auto byte_id = [&](char byte) { return byte_ids_[static_cast<unsigned char>(byte)]; };
      if (std::ranges::all_of(bytes, [&](char byte) { return byte_id(byte) != kNoToken; })) {
        for (const char byte : bytes) symbols.push_back(byte_id(byte));
        continue;  // a pending unknown token stays pending, as in the package
      }
    }
    if (!has_unknown_) continue;  // the package drops the character
    require(unknown_ != kNoToken, ErrorKind::kCorrupt,
            "{}: model.unk_token is not in the vocabulary", source_);
    if (pending && !fuse_unk_) symbols.push_back(unknown_);
    pending = true;
  }
  if (pending) symbols.push_back(unknown_);
}

void Bpe::merge_short(std::vector<TokenId>& symbols, Scratch& scratch) const {
  auto& ranks = scratch.ranks_;  // of each symbol with its successor
  ranks.assign(symbols.size(), MergeTable::kNoRank);
  const auto rank_at = [&](std::size_t i) {
    return i + 1 < symbols.size() ? merges_.find(symbols[i], symbols[i + 1]).rank
                                  : MergeTable::kNoRank;
  };
  for (std::size_t i = 0; i + 1 < symbols.size(); ++i) ranks[i] = rank_at(i);
  while (symbols.size() > 1) {
    const auto best = std::ranges::min_element(ranks);
    if (*best == MergeTable::kNoRank) return;
    const auto at = static_cast<std::size_t>(best - ranks.begin());
    symbols[at] = merges_.find(symbols[at], symbols[at + 1]).id;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    ranks.erase(best + 1);
    ranks[at] = rank_at(at);
    if (at > 0) ranks[at - 1] = rank_at(at - 1);
  }
}

void Bpe::merge_long(std::vector<TokenId>& symbols, Scratch& scratch) const {
  require(symbols.size() < 0x7FFFFFFF, ErrorKind::kUsage, "a word of {} characters is too long",
          symbols.size());
  auto& queue = scratch.queue_;  // (rank, position), the least on top
  auto& previous = scratch.previous_;
  auto& next = scratch.next_;
  const auto count = static_cast<std::int32_t>(symbols.size());
  const auto at = [](std::int32_t i) { return static_cast<std::size_t>(i); };
  previous.resize(symbols.size());
  next.resize(symbols.size());
  queue.clear();
  const auto offer = [&](std::int32_t left, std::int32_t right) {
    const auto rank = merges_.find(symbols[at(left)], symbols[at(right)]).rank;
    if (rank == MergeTable::kNoRank) return false;
    queue.push_back(std::uint64_t{rank} << 32 | static_cast<std::uint32_t>(left));
    return true;
  };
  const auto push = [&](std::int32_t left, std::int32_t right) {
    if (offer(left, right)) std::ranges::push_heap(queue, std::greater<>());
  };
  for (std::int32_t i = 0; i < count; ++i) {
    previous[at(i)] = i - 1;
    next[at(i)] = i + 1;
    if (i + 1 < count) offer(i, i + 1);
  }
  std::ranges::make_heap(queue, std::greater<>());
  while (!queue.empty()) {
    std::ranges::pop_heap(queue, std::greater<>());
    const auto rank = static_cast<std::uint32_t>(queue.back() >> 32);
    const auto left = static_cast<std::int32_t>(queue.back() & 0xFFFFFFFF);
    queue.pop_back();
    const auto right = next[at(left)];
    if (symbols[at(left)] == kNoToken || right == count) continue;
    const auto merge = merges_.find(symbols[at(left)], symbols[at(right)]);
    if (merge.rank != rank) continue;  // one of the two has changed since
    symbols[at(left)] = merge.id;
    symbols[at(right)] = kNoToken;
    next[at(left)] = next[at(right)];
    if (next[at(left)] != count) {
      previous[at(next[at(left)])] = left;
      push(left, next[at(left)]);
    }
    if (previous[at(left)] >= 0) push(previous[at(left)], left);
  }
  std::erase(symbols, kNoToken);
}

const std::string* Bpe::token_of(TokenId id) const {
  const auto index = static_cast<std::size_t>(id);
  return id >= 0 && index < taken_.size() && taken_[index] ? &tokens_[index] : nullptr;
}

}  // namespace ferry::rollout::text
