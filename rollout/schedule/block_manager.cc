#include "rollout/schedule/block_manager.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::rollout {
namespace {

PrefixHash hash_of(const PrefixHash& before, std::span<const std::int64_t> tokens) {
  const auto of_tokens = XXH3_128bits_withSeed(tokens.data(), tokens.size_bytes(), before.low);
  const std::uint64_t chain[] = {before.high, before.low, of_tokens.high64, of_tokens.low64};
  const auto all = XXH3_128bits(chain, sizeof chain);
  return {.low = all.low64, .high = all.high64};
}

// The same tokens have another block in each group.
PrefixHash of_group(PrefixHash hash, std::size_t group) {
  hash.low += group;
  return hash;
}

}  // namespace

BlockManager::BlockManager(std::int64_t num_blocks,
                           std::int64_t block_size,
                           bool enable_prefix_caching,
                           std::int64_t num_state_slots,
                           std::vector<Window> windows,
                           std::int64_t num_snapshots)
    : block_size_(block_size),
      enable_prefix_caching_(enable_prefix_caching),
      windows_(std::move(windows)),
      has_state_slots_(num_state_slots > 0),
      snapshots_(num_state_slots, num_snapshots) {
  require(num_blocks > 0 && num_blocks < std::numeric_limits<std::int32_t>::max() && block_size > 0,
          ErrorKind::kUsage, "a cache of {} blocks of {} tokens", num_blocks, block_size);
  require(!has_state_slots_ || !enable_prefix_caching || num_snapshots > 0, ErrorKind::kBug,
          "a prefix cache of states of linear attention without slots");
  for (auto slot = num_state_slots; slot-- > 0;) free_state_slots_.push_back(slot);
  blocks_.resize(static_cast<std::size_t>(num_blocks));
  for (std::int32_t id = 0; id < static_cast<std::int32_t>(num_blocks); ++id) push_free(id);
}

std::int64_t BlockManager::num_missing(const Sequence& sequence,
                                       std::int64_t tokens,
                                       std::int64_t step_tokens) const {
  std::int64_t missing = 0;
  for (std::size_t group = 0; group < num_groups(); ++group) {
    const auto& table = sequence.block_tables[group];
    const auto has = std::ranges::count_if(table, [](auto id) { return id != Sequence::kNoBlock; });
    const auto most = most_blocks({windows_[group]}, tokens, step_tokens, block_size_);
    missing += std::min<std::int64_t>(blocks_of(tokens) - std::ssize(table),
                                      std::max<std::int64_t>(most - has, 0));
  }
  return missing;
}

bool BlockManager::take_cached_prefix(Sequence& sequence) {
  require(!sequence.has_blocks(), ErrorKind::kBug, "{}: has blocks already", sequence.request_id);
  sequence.block_tables.assign(num_groups(), {});
  sequence.block_hashes.clear();
  if (has_state_slots_) sequence.num_prefill_tokens = sequence.size();
  const bool takes = enable_prefix_caching_ && !sequence.wants_prompt_logprobs;
  if (takes) {
    auto beginning = find_beginning(sequence);
    if (has_state_slots_ && !take_states(sequence, beginning)) return false;
    take_full_blocks(sequence, std::move(beginning));
  }
  sequence.num_computed_tokens = std::ssize(sequence.block_hashes) * block_size_;
  if (takes && !has_state_slots_) take_prompt_end(sequence);
  sequence.num_cached_tokens = sequence.num_computed_tokens;
  return true;
}

BlockManager::Beginning BlockManager::find_beginning(const Sequence& sequence) const {
  Beginning beginning{.ids = std::vector<std::vector<std::int32_t>>(num_groups())};
  auto& [hashes, found] = beginning;
  const auto most = (sequence.size() - 1) / block_size_;
  for (bool goes_on = true; goes_on && std::ssize(hashes) < most;) {
    const auto i = std::ssize(hashes);
    const auto tokens = tokens_of(sequence, i);
    hashes.push_back(hash_of(hashes.empty() ? sequence.visual_hash : hashes.back(), tokens));
    for (std::size_t group = 0; group < num_groups(); ++group) {
      found[group].push_back(find(hashes.back(), group, tokens, &Block::full));
      goes_on = goes_on && (windows_[group] || found[group].back() >= 0);
    }
    if (!goes_on) hashes.pop_back();
  }
  return beginning;
}

// Leaves the blocks of the longest prefix whose states there are, and copies these. Two prefixes
// may be kept: all blocks that others have too, and all of the prompt before its last token.
bool BlockManager::take_states(Sequence& sequence, Beginning& beginning) {
  auto hashes = beginning.hashes;
  const auto known = std::ssize(hashes);
  for (auto i = known; i < (sequence.size() - 1) / block_size_; ++i)
    hashes.push_back(
        hash_of(hashes.empty() ? sequence.visual_hash : hashes.back(), tokens_of(sequence, i)));
  const auto hash_of_prefix = [&](std::int64_t blocks) -> const PrefixHash& {
    return hashes[static_cast<std::size_t>(blocks - 1)];
  };
  auto count = known;
  while (count > 0 && !snapshots_.has(hash_of_prefix(count))) --count;
  for (auto blocks = count + 1; blocks <= std::ssize(hashes); ++blocks)
    if (snapshots_.is_coming(hash_of_prefix(blocks))) return false;
  std::vector<KeptPrefix> kept;
  const auto keep = [&](std::int64_t blocks) {
    if (blocks > count)
      kept.push_back({.tokens = blocks * block_size_, .hash = hash_of_prefix(blocks)});
  };
  const auto of_prompt = (sequence.num_prompt_tokens - 1) / block_size_;
  if (known < of_prompt && snapshots_.num_free() > 1) keep(known);
  keep(of_prompt);
  if (std::ssize(kept) > snapshots_.num_free()) return false;
  for (const auto& prefix : kept) snapshots_.announce(prefix.hash);
  sequence.kept_prefixes = std::move(kept);
  if (count > 0) sequence.copied_state = snapshots_.use(hash_of_prefix(count));
  beginning.hashes.resize(static_cast<std::size_t>(count));
  return true;
}

// Takes as many blocks as all groups have: those of all tokens, or of the window before the next.
void BlockManager::take_full_blocks(Sequence& sequence, Beginning beginning) {
  auto& [hashes, found] = beginning;
  auto count = std::ssize(hashes);
  const auto first_seen = [&](std::size_t group) {
    return first_block(count * block_size_, windows_[group], block_size_);
  };
  for (std::size_t group = 0; group < num_groups();) {  // again from the first if fewer are taken
    auto i = count;
    while (i > first_seen(group) && found[group][static_cast<std::size_t>(i - 1)] >= 0) --i;
    const bool lacks = i > first_seen(group);
    if (lacks) count = i - 1;
    group = lacks ? 0 : group + 1;
  }
  for (std::size_t group = 0; group < num_groups(); ++group) {
    auto& table = sequence.block_tables[group];
    table.assign(static_cast<std::size_t>(std::min(count, first_seen(group))), Sequence::kNoBlock);
    for (auto i = std::ssize(table); i < count; ++i) {
      table.push_back(found[group][static_cast<std::size_t>(i)]);
      refer_to(table.back());
    }
  }
  hashes.resize(static_cast<std::size_t>(count));
  sequence.block_hashes = std::move(hashes);
}

// Leaves the copy out if it would cost the last free block that the sequence itself needs.
void BlockManager::take_prompt_end(Sequence& sequence) {
  const auto tokens = prompt_end_of(sequence);
  const auto end = sequence.num_prompt_tokens - 1;
  const auto begin = std::ssize(sequence.block_hashes);
  if (tokens.empty() || begin != end / block_size_) return;
  const auto hash = hash_of(hash_before(sequence, begin), tokens);
  std::vector<std::int32_t> ids;
  std::int64_t num_unused = 0;
  for (std::size_t group = 0; group < num_groups(); ++group) {
    ids.push_back(find(hash, group, tokens, &Block::prompt_end));
    if (ids.back() < 0) return;
    num_unused += block(ids.back()).ref_count == 0 ? 1 : 0;
  }
  const auto missing =
      (blocks_of(sequence.size()) - begin) * static_cast<std::int64_t>(num_groups());
  if (num_unused > 0 && missing + num_unused > num_free_) return;
  for (const auto id : ids) refer_to(id);
  sequence.copied_from = std::move(ids);
  sequence.num_computed_tokens += static_cast<std::int64_t>(tokens.size());
}

bool BlockManager::allocate(Sequence& sequence, std::int64_t tokens) {
  if (sequence.num_computed_tokens > sequence.num_cached_tokens) release_copied(sequence);
  sequence.block_tables.resize(num_groups());
  leave_windows(sequence);
  std::int64_t missing = 0;
  for (const auto& table : sequence.block_tables)
    missing += std::max<std::int64_t>(blocks_of(tokens) - std::ssize(table), 0);
  if (missing > num_free_) return false;
  for (auto& table : sequence.block_tables)
    while (std::ssize(table) < blocks_of(tokens)) table.push_back(take_free());
  if (has_state_slots_ && sequence.state_slot < 0) {
    require(!free_state_slots_.empty(), ErrorKind::kBug, "more sequences than slots for states");
    sequence.state_slot = free_state_slots_.back();
    free_state_slots_.pop_back();
  }
  const auto known = sequence.size() - (sequence.has_unknown() ? 1 : 0);
  if (!enable_prefix_caching_) return true;
  // Decoded tokens of models with states may have other bits than those of a prompt.
  remember_full_blocks(sequence, has_state_slots_
                                     ? std::min({tokens, known, sequence.num_prefill_tokens - 1})
                                     : std::min(tokens, known));
  if (!has_state_slots_) remember_prompt_end(sequence, tokens);
  return true;
}

// Blocks before those that were given back have been, too.
void BlockManager::leave_windows(Sequence& sequence) {
  for (std::size_t group = 0; group < num_groups(); ++group) {
    auto& table = sequence.block_tables[group];
    auto i = first_block(sequence.num_computed_tokens, windows_[group], block_size_);
    for (i = std::min<std::int64_t>(i, std::ssize(table)); i-- > 0;) {
      auto& id = table[static_cast<std::size_t>(i)];
      if (id == Sequence::kNoBlock) break;
      give_back(std::exchange(id, Sequence::kNoBlock));
    }
  }
}

// A prefix whose last block has been forgotten is not kept.
void BlockManager::keep_states(Sequence& sequence, std::int64_t tokens) {
  sequence.kept_state = -1;
  auto& prefixes = sequence.kept_prefixes;
  if (prefixes.empty() || tokens < prefixes.front().tokens) return;
  const auto [end, hash] = prefixes.front();
  prefixes.erase(prefixes.begin());
  require(tokens == end, ErrorKind::kBug,
          "{}: states of {} tokens are to be kept, and there are {}", sequence.request_id, end,
          tokens);
  if (find(hash, 0, tokens_of(sequence, end / block_size_ - 1), &Block::full) >= 0)
    sequence.kept_state = snapshots_.keep(hash);
  else
    snapshots_.withdraw(hash);
}

// Frees the last blocks first, so that they are reused before the beginning, which more sequences
// share.
void BlockManager::deallocate(Sequence& sequence) {
  release_copied(sequence);
  for (auto& table : sequence.block_tables) {
    for (auto id = table.rbegin(); id != table.rend() && *id != Sequence::kNoBlock; ++id)
      give_back(*id);
    table.clear();
  }
  if (sequence.state_slot >= 0) free_state_slots_.push_back(std::exchange(sequence.state_slot, -1));
  for (const auto& prefix : std::exchange(sequence.kept_prefixes, {}))
    snapshots_.withdraw(prefix.hash);
  sequence.block_hashes.clear();
  sequence.num_computed_tokens = 0;
}

void BlockManager::reset_prefix_cache() {
  for (std::int32_t id = 0; id < static_cast<std::int32_t>(blocks_.size()); ++id) {
    forget(block(id).full, id);
    forget(block(id).prompt_end, id);
  }
}

PrefixHash BlockManager::hash_before(const Sequence& sequence, std::int64_t index) {
  return index == 0 ? sequence.visual_hash
                    : sequence.block_hashes[static_cast<std::size_t>(index - 1)];
}

std::span<const std::int64_t> BlockManager::tokens_of(const Sequence& sequence,
                                                      std::int64_t index) const {
  return std::span(sequence.token_ids)
      .subspan(static_cast<std::size_t>(index * block_size_),
               static_cast<std::size_t>(block_size_));
}

std::span<const std::int64_t> BlockManager::prompt_end_of(const Sequence& sequence) const {
  const auto end = sequence.num_prompt_tokens - 1;
  const auto size = end % block_size_;
  return sequence.prompt().subspan(static_cast<std::size_t>(end - size),
                                   static_cast<std::size_t>(size));
}

// Compares the tokens as well: a collision of hashes cannot give a sequence another one's keys.
std::int32_t BlockManager::find(const PrefixHash& hash,
                                std::size_t group,
                                std::span<const std::int64_t> tokens,
                                Content Block::*kind) const {
  const auto found = cached_.find(of_group(hash, group));
  if (found == cached_.end()) return -1;
  const auto& known = (blocks_[static_cast<std::size_t>(found->second)].*kind).token_ids;
  return std::ranges::equal(known, tokens) ? found->second : -1;
}

void BlockManager::remember_full_blocks(Sequence& sequence, std::int64_t tokens) {
  auto& hashes = sequence.block_hashes;
  for (auto i = std::ssize(hashes); i < tokens / block_size_; ++i) {
    const auto ids = tokens_of(sequence, i);
    hashes.push_back(hash_of(hash_before(sequence, i), ids));
    for (std::size_t group = 0; group < num_groups(); ++group) {
      const auto id = sequence.block_tables[group][static_cast<std::size_t>(i)];
      if (id != Sequence::kNoBlock) remember(block(id).full, id, hashes.back(), group, ids);
    }
  }
}

// Remembers the end of a prompt in the step that computes it.
void BlockManager::remember_prompt_end(const Sequence& sequence, std::int64_t tokens) {
  const auto end = sequence.num_prompt_tokens - 1;
  if (sequence.num_computed_tokens >= end || tokens < end) return;
  const auto ids = prompt_end_of(sequence);
  if (ids.empty()) return;
  const auto index = end / block_size_;
  const auto hash = hash_of(hash_before(sequence, index), ids);
  for (std::size_t group = 0; group < num_groups(); ++group) {
    const auto id = sequence.block_tables[group][static_cast<std::size_t>(index)];
    remember(block(id).prompt_end, id, hash, group, ids);
  }
}

// The first of several blocks with the same content is the one that is found.
void BlockManager::remember(Content& content,
                            std::int32_t id,
                            const PrefixHash& hash,
                            std::size_t group,
                            std::span<const std::int64_t> tokens) {
  content.hash = of_group(hash, group);
  if (cached_.try_emplace(content.hash, id).second)
    content.token_ids.assign(tokens.begin(), tokens.end());
}

void BlockManager::refer_to(std::int32_t id) {
  if (block(id).ref_count++ == 0) unlink_free(id);
}

void BlockManager::give_back(std::int32_t id) {
  auto& one = block(id);
  require(one.ref_count > 0, ErrorKind::kBug, "block {} is given back twice", id);
  if (--one.ref_count == 0) push_free(id);
}

void BlockManager::release_copied(Sequence& sequence) {
  for (const auto id : std::exchange(sequence.copied_from, {})) give_back(id);
  sequence.copied_state = -1;
}

std::int32_t BlockManager::take_free() {
  const auto id = first_free_;
  unlink_free(id);
  auto& one = block(id);
  forget(one.full, id);
  forget(one.prompt_end, id);
  one.ref_count = 1;
  return id;
}

void BlockManager::push_free(std::int32_t id) {
  auto& one = block(id);
  one.previous = last_free_;
  one.next = -1;
  (last_free_ < 0 ? first_free_ : block(last_free_).next) = id;
  last_free_ = id;
  ++num_free_;
}

void BlockManager::unlink_free(std::int32_t id) {
  auto& one = block(id);
  (one.previous < 0 ? first_free_ : block(one.previous).next) = one.next;
  (one.next < 0 ? last_free_ : block(one.next).previous) = one.previous;
  --num_free_;
}

void BlockManager::forget(Content& content, std::int32_t id) {
  if (content.token_ids.empty()) return;
  const auto found = cached_.find(content.hash);
  if (found != cached_.end() && found->second == id) {
    cached_.erase(found);
    snapshots_.forget(content.hash);
  }
  content.token_ids.clear();
}

}  // namespace ferry::rollout
