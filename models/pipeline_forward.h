// One batch through all stages of a pipeline, one stage after another: for evaluation and
// comparison. Training has schedules.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "models/gpt_model.h"

namespace ferry::models {

// Makes the chunks of this rank's stage, first to last. Throws Error(kUsage) if the model cannot be
// split so, Error(kDevice), before anything is allocated, if the device has no room for its
// parameters: `sizes` are what the caller's users set against that.
std::vector<std::unique_ptr<GPTModel>> make_stage(const TransformerConfig& config,
                                                  const ParallelState& mesh,
                                                  const ModelOptions& options,
                                                  const std::string& sizes = "--tp, --pp, --ep");

// The shards of all chunks of a stage, which are given by unique_ptrs or pointers.
template <typename Chunks>
std::vector<distckpt::LocalShard> sharded_state_dict(const Chunks& chunks) {
  std::vector<distckpt::LocalShard> all;
  for (const auto& chunk : chunks) {
    auto shards = chunk->sharded_state_dict();
    std::ranges::move(shards, std::back_inserter(all));
  }
  return all;
}
// The addresses of the owners of these shards, in their order (Parameters::owner_addresses).
template <typename Chunks>
std::vector<std::byte*> owner_addresses(const Chunks& chunks) {
  std::vector<std::byte*> all;
  for (const auto& chunk : chunks)
    std::ranges::copy(chunk->parameters().owner_addresses(), std::back_inserter(all));
  return all;
}

// The stages that a chunk of a stage gets its input from and hands its output to, -1 for none: the
// pipeline goes round all stages once for each chunk.
struct Neighbours {
  int before = -1;
  int behind = -1;
};
Neighbours neighbours(const ParallelState& mesh, std::size_t chunk, std::size_t num_chunks);

// Memory for the input of a chunk: [local tokens, hidden].
at::Tensor empty_hidden(const GPTModel& model, const SequencePartition& batch);

// Returns the output of the last chunk on the last stage, an undefined tensor on the others.
// `received` and `sent`, if not null, get the input of each chunk (undefined for the first) and its
// output, for a backward pass.
at::Tensor pipeline_forward(const std::vector<std::unique_ptr<GPTModel>>& chunks,
                            const SequencePartition& batch,
                            const Observer& observe = {},
                            std::vector<at::Tensor>* received = nullptr,
                            std::vector<at::Tensor>* sent = nullptr);

}  // namespace ferry::models
