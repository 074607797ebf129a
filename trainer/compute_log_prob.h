// Log-probabilities and entropies of the tokens of finished sequences, through all stages of a
// pipeline (verl's compute_log_prob): what old, reference and new policies are compared by. In
// kBitwise they do not depend on the mesh, nor on how the sequences are cut into micro-batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "trainer/pipeline_schedule.h"
#include "trainer/seqlen_balancing.h"

namespace ferry::trainer {

// Of one sequence of T tokens: at place t what was said of token t + 1. [T - 1], fp32, on the host.
struct SequenceLogProbs {
  at::Tensor log_probs{};
  at::Tensor entropys{};
};

// Called by all ranks of the mesh, with the sequences of their data parallel rank: [tokens] each,
// int64, on the host, at least one token. `parts`: those of each micro-batch, every sequence in
// one, as many on all ranks. Logits are divided by the temperature. The same on all ranks of a data
// parallel rank, in the order of `sequences`. `routed_experts`: as of forward_sequences().
std::vector<SequenceLogProbs> compute_log_prob(const Pipeline& pipeline,
                                               const std::vector<at::Tensor>& sequences,
                                               const std::vector<Partition>& parts,
                                               double temperature = 1,
                                               std::vector<at::Tensor>* routed_experts = nullptr);

}  // namespace ferry::trainer
