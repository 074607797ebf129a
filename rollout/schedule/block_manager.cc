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

}  // namespace

BlockManager::BlockManager(std::int64_t num_blocks,
                           std::int64_t block_size,
                           bool enable_prefix_caching,
                           std::int64_t num_state_slots)
    : block_size_(block_size),
      enable_prefix_caching_(enable_prefix_caching),
      has_state_slots_(num_state_slots > 0) {
  require(num_blocks > 0 && num_blocks < std::numeric_limits<std::int32_t>::max() && block_size > 0,
          ErrorKind::kUsage, "a cache of {} blocks of {} tokens", num_blocks, block_size);
  require(!has_state_slots_ || !enable_prefix_caching, ErrorKind::kBug,
          "states of linear attention have no prefix cache");
  for (auto slot = num_state_slots; slot-- > 0;) free_state_slots_.push_back(slot);
  blocks_.resize(static_cast<std::size_t>(num_blocks));
  for (std::int32_t id = 0; id < static_cast<std::int32_t>(num_blocks); ++id) push_free(id);
}

void BlockManager::take_cached_prefix(Sequence& sequence) {
  require(sequence.block_table.empty(), ErrorKind::kBug, "{}: has blocks already",
          sequence.request_id);
  sequence.num_computed_tokens = 0;
  if (enable_prefix_caching_) {
    auto hash = sequence.visual_hash;
    for (std::int64_t i = 0; i < (sequence.size() - 1) / block_size_; ++i) {
      const auto tokens = tokens_of(sequence, i);
      hash = hash_of(hash, tokens);
      const auto id = find(hash, tokens, &Block::full);
      if (id < 0) break;
      refer_to(id);
      sequence.block_table.push_back(id);
    }
  }
  sequence.num_hashed_blocks = static_cast<std::int64_t>(sequence.block_table.size());
  sequence.num_computed_tokens = sequence.num_hashed_blocks * block_size_;
  if (enable_prefix_caching_) take_prompt_end(sequence);
  sequence.num_cached_tokens = sequence.num_computed_tokens;
}

// Leaves the copy out if it would cost the last free block that the sequence itself needs.
void BlockManager::take_prompt_end(Sequence& sequence) {
  const auto tokens = prompt_end_of(sequence);
  const auto end = sequence.num_prompt_tokens - 1;
  if (tokens.empty() || sequence.num_hashed_blocks != end / block_size_) return;
  const auto before = hash_before(sequence, sequence.num_hashed_blocks);
  const auto id = find(hash_of(before, tokens), tokens, &Block::prompt_end);
  if (id < 0) return;
  const auto missing = blocks_of(sequence.size()) - sequence.num_hashed_blocks;
  if (block(id).ref_count == 0 && missing >= num_free_) return;
  refer_to(id);
  sequence.copied_from = id;
  sequence.num_computed_tokens += static_cast<std::int64_t>(tokens.size());
}

bool BlockManager::allocate(Sequence& sequence, std::int64_t tokens) {
  if (sequence.num_computed_tokens > sequence.num_cached_tokens) release_copied(sequence);
  const auto missing = blocks_of(tokens) - static_cast<std::int64_t>(sequence.block_table.size());
  if (missing > num_free_) return false;
  for (std::int64_t i = 0; i < missing; ++i) sequence.block_table.push_back(take_free());
  if (has_state_slots_ && sequence.state_slot < 0) {
    require(!free_state_slots_.empty(), ErrorKind::kBug, "more sequences than slots for states");
    sequence.state_slot = free_state_slots_.back();
    free_state_slots_.pop_back();
  }
  const auto known = sequence.size() - (sequence.has_unknown() ? 1 : 0);
  if (enable_prefix_caching_) {
    remember_full_blocks(sequence, std::min(tokens, known));
    remember_prompt_end(sequence, tokens);
  }
  return true;
}

// Frees the last blocks first, so that they are reused before the beginning, which more sequences
// share.
void BlockManager::deallocate(Sequence& sequence) {
  release_copied(sequence);
  for (auto id = sequence.block_table.rbegin(); id != sequence.block_table.rend(); ++id)
    give_back(*id);
  sequence.block_table.clear();
  if (sequence.state_slot >= 0) free_state_slots_.push_back(std::exchange(sequence.state_slot, -1));
  sequence.num_hashed_blocks = 0;
  sequence.num_computed_tokens = 0;
}

void BlockManager::reset_prefix_cache() {
  for (std::int32_t id = 0; id < static_cast<std::int32_t>(blocks_.size()); ++id) {
    forget(block(id).full, id);
    forget(block(id).prompt_end, id);
  }
}

PrefixHash BlockManager::hash_before(const Sequence& sequence, std::int64_t index) const {
  if (index == 0) return sequence.visual_hash;
  const auto id = sequence.block_table[static_cast<std::size_t>(index - 1)];
  return blocks_[static_cast<std::size_t>(id)].full.hash;
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
                                std::span<const std::int64_t> tokens,
                                Content Block::*kind) const {
  const auto found = cached_.find(hash);
  if (found == cached_.end()) return -1;
  const auto& known = (blocks_[static_cast<std::size_t>(found->second)].*kind).token_ids;
  return std::ranges::equal(known, tokens) ? found->second : -1;
}

void BlockManager::remember_full_blocks(Sequence& sequence, std::int64_t tokens) {
  auto& hashed = sequence.num_hashed_blocks;
  if (hashed == tokens / block_size_) return;
  auto hash = hash_before(sequence, hashed);
  for (; hashed < tokens / block_size_; ++hashed) {
    const auto id = sequence.block_table[static_cast<std::size_t>(hashed)];
    const auto ids = tokens_of(sequence, hashed);
    hash = hash_of(hash, ids);
    remember(block(id).full, id, hash, ids);
  }
}

// Remembers the end of a prompt in the step that computes it.
void BlockManager::remember_prompt_end(const Sequence& sequence, std::int64_t tokens) {
  const auto end = sequence.num_prompt_tokens - 1;
  if (sequence.num_computed_tokens >= end || tokens < end) return;
  const auto ids = prompt_end_of(sequence);
  if (ids.empty()) return;
  const auto index = end / block_size_;
  const auto id = sequence.block_table[static_cast<std::size_t>(index)];
  remember(block(id).prompt_end, id, hash_of(hash_before(sequence, index), ids), ids);
}

// The first of several blocks with the same content is the one that is found.
void BlockManager::remember(Content& content,
                            std::int32_t id,
                            const PrefixHash& hash,
                            std::span<const std::int64_t> tokens) {
  content.hash = hash;
  if (cached_.try_emplace(hash, id).second) content.token_ids.assign(tokens.begin(), tokens.end());
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
  if (sequence.copied_from >= 0) give_back(std::exchange(sequence.copied_from, -1));
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
  if (found != cached_.end() && found->second == id) cached_.erase(found);
  content.token_ids.clear();
}

}  // namespace ferry::rollout
