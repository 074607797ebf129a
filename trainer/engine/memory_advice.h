// Advice for a role that finds no memory, or will find none: the buffer, and the settings that
// would make it fit, by the formulas of memory_needs.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "models/distributed/parallel_state.h"
#include "models/gpt_model.h"
#include "models/transformer/packed_sequences.h"
#include "trainer/config/run_sections.h"
#include "trainer/engine/memory_needs.h"
#include "trainer/engine/out_of_memory.h"

namespace ferry::trainer {

// How a role cuts sequences into micro-batches, and where the configuration says so.
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
};

// This rank's part of a batch.
struct BatchShape {
  MicroBatchShape largest{};
  std::int64_t longest_sequence = 0;  // tokens of it on this rank
  std::size_t num_micro_batches = 1;
};
BatchShape shape_of(std::span<const models::SequencePartition> batches, std::int64_t cp);

class MemoryAdvice {
 public:
  // `mesh` outlives this. `memory` has nothing but parameters where the role does not learn.
  MemoryAdvice(MemorySettings settings,
               const EngineConfig& engine,
               const models::ModelMemory& memory,
               const models::ParallelState& mesh);

  // Memory that a role has all the time: `bytes` for `name`, while it holds `held` already.
  Buffer of_model(const std::string& name, std::int64_t bytes, std::int64_t held) const;
  // Masters and moments that live on the host.
  Buffer of_state_on_host() const;
  // The passes of a batch through the chunks of this rank.
  Buffer of_batch(const std::vector<models::GPTModel*>& chunks,
                  const BatchShape& batch,
                  bool forward_only) const;
  // The loss within those passes, whose buffer says what fits.
  Buffer of_loss(const models::GPTModel& chunk, std::int64_t tokens) const;
  // The copy that a save in the background writes from.
  Buffer of_snapshot() const;

  // Compares the largest micro-batches that the settings allow with the memory that is free now,
  // less the `returning` bytes that the role takes back before: "" if they fit, else what would.
  std::string expect(const std::vector<models::GPTModel*>& chunks,
                     bool forward_only,
                     std::int64_t returning = 0) const;

 private:
  // Bytes that allocators can make use of: they lose some to rounding and holes.
  std::int64_t usable(std::int64_t room) const;
  std::string ways(const std::vector<models::GPTModel*>& chunks,
                   const BatchShape& batch,
                   bool forward_only,
                   std::int64_t room) const;
  std::string list() const;

  MemorySettings settings_;
  bool optimizer_offload_;
  models::ModelMemory memory_;
  const models::ParallelState& mesh_;
};

// Notes of all ranks, each text once, with the ranks that have it: "ranks 0, 2: ...". Called by
// all.
std::vector<std::string> gather_notes(const models::ProcessGroup& ranks,
                                      const std::vector<std::string>& mine);

}  // namespace ferry::trainer
