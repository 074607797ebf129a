// A function of every token of finished sequences, computed by the last stage of a pipeline and
// told to all stages: log-probabilities, values and scores are such functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"
#include "trainer/engine/visual_inputs.h"

namespace ferry::trainer {

// A function of the last stage's normed hidden states: [local tokens, channels], the same on all
// tensor parallel ranks. No graph is kept.
using TokenFunction = std::function<at::Tensor(const models::GPTModel& model,
                                               const at::Tensor& hidden,
                                               const models::SequencePartition& batch)>;

struct SequenceOptions {
  std::int64_t channels = 1;
  std::vector<at::Tensor> scored{};  // as of pack_micro_batches()
  std::vector<models::SamplingMask> masks{};
  VisualInputs visual{};
  // If it is not null, it has where tokens go, of each sequence (router_replay.h); if it is empty,
  // it gets where they went.
  std::vector<at::Tensor>* routed_experts = nullptr;
};

// Called by all ranks of the mesh, with the sequences of their data parallel rank: [tokens] each,
// int64, on the host, at least one token. `parts`: those of each micro-batch, every sequence in
// one, as many on all ranks; indices behind the last sequence are padding. Returns [tokens,
// channels] of each sequence, fp32, on the host, the same on all ranks of a data parallel rank.
std::vector<at::Tensor> forward_sequences(const Pipeline& pipeline,
                                          const std::vector<at::Tensor>& sequences,
                                          const std::vector<Partition>& parts,
                                          const TokenFunction& say,
                                          const SequenceOptions& options);

}  // namespace ferry::trainer
