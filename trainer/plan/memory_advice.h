// Advice for a role that finds no memory, or will find none: the buffer, and the settings that
// would make it fit, by the formulas of memory_needs.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "trainer/config/run_sections.h"
#include "trainer/plan/memory_needs.h"

namespace ferry::trainer {

// "3.2 GiB", "17 MiB".
std::string in_words(std::int64_t bytes);
// "rank 3", "ranks 0-2, 4".
std::string in_words(const std::vector<int>& ranks);

// The keys of a section that share a model out over more ranks, the one that does most first.
std::string sharing_keys(std::string_view section, const models::TransformerConfig& model);

// Memory that is being allocated.
struct Buffer {
  std::string name{};  // "the gradients, 3.2 GiB"
  // Says what would fit into so many bytes; called when all that was allocated for it is free
  // again. Empty inside of another buffer's allocation, which knows.
  std::function<std::string(std::int64_t room)> what_fits{};
};

// The cut of a role's sequences into micro-batches, and where the configuration says so.
struct MicroBatchSettings {
  std::string prefix = "data.";  // of max_token_len_per_gpu and micro_batch_size_per_gpu
  MicroBatchSize size{};
};

// The settings of a role that decide what fits, under the names that its run has for them.
struct MemorySettings {
  std::string engine = "engine";            // the section of its mesh
  MicroBatchSettings learning{};            // of passes that are learned from
  MicroBatchSettings computing{};           // of others
  std::string longest = "data.max_length";  // the key that bounds a sequence
  std::int64_t longest_sequence = 0;        // tokens
  std::int64_t beside_longest = 0;          // tokens of it that are not that key's: of the prompt
  std::int64_t batch_size = 0;              // sequences of an update, of all ranks
  models::TrainingDtypes dtypes{};          // of gradients and moments
};

// This rank's part of a batch.
struct BatchShape {
  MicroBatchShape largest{};
  std::int64_t longest_sequence = 0;  // tokens of it on this rank
  std::size_t num_micro_batches = 1;
};

class MemoryAdvice {
 public:
  MemoryAdvice(MemorySettings settings, const EngineConfig& engine, ModelOnRank model, bool trains);

  const models::ModelMemory& memory() const { return memory_; }

  // Memory that a role has all the time: `bytes` for `name`, while it holds `held` already.
  Buffer of_model(const std::string& name, std::int64_t bytes, std::int64_t held) const;
  // Masters and moments that live on the host.
  Buffer of_state_on_host() const;
  // The passes of a batch.
  Buffer of_batch(const BatchShape& batch, bool forward_only) const;
  // The loss within those passes, whose buffer says what fits.
  Buffer of_loss(std::int64_t tokens) const;
  // The copy that a save in the background writes from.
  Buffer of_snapshot() const;

  // The largest micro-batches that the settings allow.
  BatchShape largest_batch(bool forward_only) const;
  // Compares them with the memory that is free: "" if they fit, else what would.
  std::string expect(bool forward_only, std::int64_t free) const;
  // The settings under which a batch would fit into `room`.
  std::string ways(const BatchShape& batch, bool forward_only, std::int64_t room) const;

 private:
  const models::Recompute& recompute_of(bool forward_only) const;
  std::int64_t needed(const BatchShape& batch, const models::Recompute& recompute) const;
  std::string list() const;

  MemorySettings settings_;
  bool optimizer_offload_;
  ModelOnRank model_;
  models::ModelMemory memory_;
};

}  // namespace ferry::trainer
