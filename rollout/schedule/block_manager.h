// Assigns blocks of the KV cache to sequences. Blocks have reference counts: sequences with the
// same beginning share their first full blocks, found by a chained hash of the tokens (nano-vllm's
// BlockManager, vLLM's prefix cache). A block without references keeps its content, and can be
// found again, until it is reused: the one unused longest first.
//
// The end of a prompt, which does not fill a block, is found by sequences of the same prompt. They
// write behind it, so each begins a block of its own with a copy.
//
// Each group of layers (kv_cache_groups.h) has blocks of its own, from one set. A group with a
// sliding window gives back those that lie before it; a sequence that begins as another one did
// needs, in such a group, only the blocks of the window before its first own token.
//
// A sequence with blocks also has a slot for states of linear attention, where the model has such
// layers. States are of all tokens so far: a sequence begins with the blocks of a prefix if a
// snapshot (state_snapshots.h) has the states behind it, and computes what follows. Snapshots are
// kept behind the full blocks of a prompt without its last token, and behind the full blocks that a
// prompt has in common with another one. They go with the last block of their prefix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "distckpt/base/integers.h"
#include "rollout/schedule/kv_cache_groups.h"
#include "rollout/schedule/sequence.h"
#include "rollout/schedule/state_snapshots.h"

namespace ferry::rollout {

class BlockManager {
 public:
  // num_state_slots: 0, or the most sequences that have blocks; windows: of each group of layers;
  // num_snapshots: slots behind those of states, at least one if there are states and a prefix
  // cache. Throws Error(kUsage) unless the others are positive.
  BlockManager(std::int64_t num_blocks,
               std::int64_t block_size,
               bool enable_prefix_caching,
               std::int64_t num_state_slots = 0,
               std::vector<Window> windows = {std::nullopt},
               std::int64_t num_snapshots = 0);

  std::int64_t block_size() const { return block_size_; }
  std::int64_t num_blocks() const { return static_cast<std::int64_t>(blocks_.size()); }
  std::int64_t num_free_blocks() const { return num_free_; }
  const std::vector<Window>& windows() const { return windows_; }
  // Blocks that a sequence lacks, at most at a time, to compute its first `tokens` tokens in steps
  // of so many.
  std::int64_t num_missing(const Sequence& sequence,
                           std::int64_t tokens,
                           std::int64_t step_tokens) const;

  // Gives a sequence without blocks the cached blocks that it begins with, and until its next step
  // the one that it copies the end of its prompt from, or the slot that it copies its states from.
  // Its last token is always computed, because its logits are needed. Sets num_computed_tokens,
  // num_cached_tokens, copied_from, copied_state and kept_prefixes. Returns false, and gives
  // nothing, if it has to wait: a running sequence computes states that it may begin with, or all
  // slots for states that it would keep are announced to others.
  bool take_cached_prefix(Sequence& sequence);
  // Adds blocks for the first `tokens` tokens. Full blocks of known tokens enter the prefix cache
  // at once: a sequence that finds them computes its rows in the same step at the earliest. Gives
  // back blocks that the rows behind num_computed_tokens do not see. Returns false, and changes
  // nothing else, if too few blocks are free.
  bool allocate(Sequence& sequence, std::int64_t tokens);
  // Called for each sequence of a step, behind whose first `tokens` tokens the step ends, when all
  // have their blocks. If these are the next of kept_prefixes, the states get a slot, kept_state.
  // They may not be more than those.
  void keep_states(Sequence& sequence, std::int64_t tokens);
  // Frees all blocks of a sequence, whose num_computed_tokens becomes 0.
  void deallocate(Sequence& sequence);

  // Forgets the content of all blocks, for new weights.
  void reset_prefix_cache();

 private:
  struct Content {
    PrefixHash hash{};
    std::vector<std::int64_t> token_ids{};  // empty unless the prefix cache knows it
  };
  struct Block {
    std::int64_t ref_count = 0;
    Content full{}, prompt_end{};
    std::int32_t previous = -1;  // in the list of free blocks
    std::int32_t next = -1;
  };
  // The full blocks of a sequence's beginning that the cache has.
  struct Beginning {
    std::vector<PrefixHash> hashes{};
    // The blocks of each group; before its window one may be missing: -1.
    std::vector<std::vector<std::int32_t>> ids{};
  };

  Block& block(std::int32_t id) { return blocks_[static_cast<std::size_t>(id)]; }
  std::size_t num_groups() const { return windows_.size(); }
  std::int64_t blocks_of(std::int64_t tokens) const {
    return distckpt::ceil_div(tokens, block_size_);
  }
  static PrefixHash hash_before(const Sequence& sequence, std::int64_t index);
  std::span<const std::int64_t> tokens_of(const Sequence& sequence, std::int64_t index) const;
  // The tokens behind the full blocks of the prompt without its last token.
  std::span<const std::int64_t> prompt_end_of(const Sequence& sequence) const;
  std::int32_t find(const PrefixHash& hash,
                    std::size_t group,
                    std::span<const std::int64_t> tokens,
                    Content Block::*kind) const;
  Beginning find_beginning(const Sequence& sequence) const;
  bool take_states(Sequence& sequence, Beginning& beginning);
  void take_full_blocks(Sequence& sequence, Beginning beginning);
  void take_prompt_end(Sequence& sequence);
  void leave_windows(Sequence& sequence);
  void remember_full_blocks(Sequence& sequence, std::int64_t tokens);
  void remember_prompt_end(const Sequence& sequence, std::int64_t tokens);
  void remember(Content& content,
                std::int32_t id,
                const PrefixHash& hash,
                std::size_t group,
                std::span<const std::int64_t> tokens);
  void refer_to(std::int32_t id);
  void give_back(std::int32_t id);
  void release_copied(Sequence& sequence);
  std::int32_t take_free();
  void push_free(std::int32_t id);
  void unlink_free(std::int32_t id);
  void forget(Content& content, std::int32_t id);

  std::int64_t block_size_;
  bool enable_prefix_caching_;
  std::vector<Window> windows_;  // of the groups
  bool has_state_slots_;
  std::vector<std::int64_t> free_state_slots_;  // the next one last
  StateSnapshots snapshots_;
  std::vector<Block> blocks_;
  std::unordered_map<PrefixHash, std::int32_t, PrefixHash::Low> cached_;
  std::int32_t first_free_ = -1;  // unused longest
  std::int32_t last_free_ = -1;
  std::int64_t num_free_ = 0;
};

}  // namespace ferry::rollout
