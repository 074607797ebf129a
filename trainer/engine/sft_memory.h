// What a fine-tuning run says when a rank runs out of memory: the buffer it was for, and which
// settings would make it fit, by the formulas of memory_needs.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "models/distributed/parallel_state.h"
#include "models/gpt_model.h"
#include "trainer/config/sft_config.h"
#include "trainer/engine/memory_needs.h"
#include "trainer/engine/out_of_memory.h"
#include "trainer/engine/seqlen_balancing.h"

namespace ferry::trainer {

// Of what lies in memory all the time: `bytes` for `name`, while a rank holds `held` of the model's
// memory already.
Buffer model_buffer(const std::string& name,
                    std::int64_t bytes,
                    std::int64_t held,
                    const models::ModelMemory& memory,
                    const models::ParallelState& mesh);

// Of a batch, this rank's part of it.
struct BatchShape {
  MicroBatchShape largest{};
  std::int64_t longest_sequence = 0;  // tokens of it on this rank
  std::size_t num_micro_batches = 1;

  // A micro-batch of so many tokens of this rank, of the sequences `part` of these lengths.
  void add(std::int64_t tokens,
           std::span<const std::int64_t> seqlens,
           const Partition& part,
           std::int64_t cp);
};

Buffer activations_buffer(const SftConfig& config,
                          const std::vector<models::GPTModel*>& chunks,
                          const BatchShape& batch,
                          const models::ModelMemory& memory);
// Among those: what fits is theirs to say.
Buffer logits_buffer(const models::GPTModel& chunk, std::int64_t tokens);
// The copy that a save in the background writes from.
Buffer snapshot_buffer(std::int64_t bytes);

}  // namespace ferry::trainer
