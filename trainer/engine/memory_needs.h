// The memory that the micro-batches of a batch need on a rank, in the order of its pipeline
// schedule, by the costs of models/spec/costs.h.
#pragma once

#include <cstdint>
#include <vector>

#include "models/gpt_model.h"
#include "models/spec/costs.h"

namespace ferry::trainer {

// Of a rank's part of a pack.
struct MicroBatchShape {
  std::int64_t tokens = 0;
  // Keys that a token attends to, padding of the causal half included: the mean of the lengths,
  // weighed by themselves. Only the host keeps attention's probabilities.
  double keys = 0;
};

// Bytes that a chunk of a model keeps of a micro-batch until its backward pass. Experts are taken
// to have equal shares.
std::int64_t activation_bytes(const models::GPTModel& chunk,
                              const models::Recompute& recompute,
                              const MicroBatchShape& shape);

// What the output layer and the loss need on top of it while they run: logits of a chunk of tokens,
// and the gradients that are made with them.
std::int64_t logits_bytes(const models::GPTModel& chunk, std::int64_t tokens);

// The most that the passes of a batch need at once, as if every token were learned from: batches on
// their way, a backward pass in its layer, the loss; not oneDNN's 10 KiB to 2 MiB a host thread.
std::int64_t batch_bytes(const std::vector<models::GPTModel*>& chunks,
                         const models::Recompute& recompute,
                         const MicroBatchShape& largest,
                         std::size_t num_micro_batches);

// The longest micro-batch, of this mean length, whose batch fits into so many bytes.
std::int64_t tokens_that_fit(const std::vector<models::GPTModel*>& chunks,
                             const models::Recompute& recompute,
                             const MicroBatchShape& like,
                             std::size_t num_micro_batches,
                             std::int64_t bytes);

}  // namespace ferry::trainer
