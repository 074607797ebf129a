// The gradients of this rank's model chunks: they accumulate over micro-batches in buffers of their
// own, and become those of the whole batch, each rank's part of them (Megatron-Core
// distributed/distributed_data_parallel.py and finalize_model_grads.py).
//
//   ddp.zero_grad();
//   ... backward passes; before the last one of a chunk, ddp.expect_last_backward(chunk) ...
//   ddp.finish_grad_sync();
//
// Nothing is averaged: the loss is that of the whole batch, normalised by a global count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "models/gpt_model.h"
#include "trainer/optimizer/param_and_grad_buffer.h"

namespace ferry::trainer {

struct DistributedDataParallelConfig {
  bool grad_reduce_in_fp32 = true;        // else gradients accumulate in the dtype of parameters
  bool overlap_grad_reduce = true;        // with the backward pass that completes them
  std::int64_t bucket_size = 40'000'000;  // elements
};

class DistributedDataParallel {
 public:
  // `chunks`: of this rank, first to last. They outlive it; their parameters move into its buffers.
  DistributedDataParallel(std::vector<models::GPTModel*> chunks,
                          DistributedDataParallelConfig config);
  ~DistributedDataParallel();
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  void zero_grad();
  // The next backward pass through this chunk is the last one of the batch: buckets that it
  // completes are summed while it goes on.
  void expect_last_backward(std::size_t chunk);
  // Called by all ranks of the mesh. Afterwards the shards of gradients are those of the batch.
  void finish_grad_sync();
  // Gives the updated shards of parameters to all ranks.
  void sync_params();

  const std::vector<models::GPTModel*>& chunks() const { return chunks_; }
  const models::ParallelState& mesh() const { return chunks_.front()->mesh(); }
  // The buffers of all chunks, first to last.
  std::vector<ParamAndGradBuffer>& buffers() { return buffers_; }
  const std::vector<ParamAndGradBuffer>& buffers() const { return buffers_; }
  std::size_t chunk_of(std::size_t buffer) const { return chunk_of_[buffer]; }
  const models::ParameterSpec& spec(std::size_t buffer, const BufferSlot& slot) const;

  // Each element of a leaf is counted by exactly one rank of all that hold it.
  bool is_counted_here(std::size_t buffer, const BufferSlot& slot) const;

 private:
  class Hook;
  struct Progress;  // of a chunk's buckets in its last backward pass

  void accumulated(std::size_t buffer, std::size_t bucket);
  void sum_over_tensor_parallel_ranks();
  void sum_embeddings();

  std::vector<models::GPTModel*> chunks_;
  DistributedDataParallelConfig config_;
  std::vector<ParamAndGradBuffer> buffers_;
  std::vector<std::size_t> chunk_of_;
  std::vector<Progress> progress_;  // of each buffer
};

}  // namespace ferry::trainer
