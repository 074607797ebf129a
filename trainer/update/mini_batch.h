// A mini-batch of a data parallel rank, cut into micro-batches: each is a pack of tokens for the
// pipeline, and a matrix of rows for the losses of actor and critic. Counts and metrics are those
// of the mini-batch on all ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "trainer/algorithms/agg_loss.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"
#include "trainer/engine/visual_inputs.h"
#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

// Marks the places that say something of a response's tokens, [length] of each row, bool: place t
// speaks of token t + 1.
std::vector<at::Tensor> scored_of(const RolloutBatch& batch);

// The sampling mask of every place of each row; none if the batch has none.
std::vector<models::SamplingMask> sampling_masks_of(const RolloutBatch& batch);

// A column [tokens, ...] by rows: [length, ...] of each; none if it is undefined.
std::vector<at::Tensor> rows_of(const RolloutBatch& batch, const at::Tensor& of_tokens);

class MiniBatch {
 public:
  // Called by all ranks of the mesh, which outlives this as the batch does, with the rows of their
  // data parallel rank and the parts of each micro-batch. Throws Error(kUsage) for a row without a
  // prompt or a response.
  MiniBatch(const RolloutBatch& batch,
            std::vector<Partition> parts,
            const models::ParallelState& mesh,
            VisualInputs visual = {});

  const models::SequencePartition& pack(std::size_t i) const { return packs_[i]; }
  // Sums over all ranks: tokens of the response masks, and rows, also those without such a token: a
  // response that is rejected makes others weigh no more where losses are means of sequences.
  GlobalBatchInfo info(double loss_scale_factor) const;
  bool teaches_nothing() const { return batch_num_tokens_ == 0; }

  // Matrices of a micro-batch are [rows, longest response], on the device, zeros behind the ends.
  //
  // Cuts them out of what the last stage says of this rank's tokens, [local]. Differentiable.
  at::Tensor of_pack(std::size_t i, const at::Tensor& local) const;
  // Cuts them out of a column [response tokens]; undefined if it is.
  at::Tensor of_column(std::size_t i, const at::Tensor& column) const;

  // Runs all forward and backward passes. Returns the metrics of the whole mini-batch, on all ranks
  // of the mesh. Tokens go where batch.routed_experts says, if it is known.
  std::map<std::string, double> run(const Pipeline& pipeline,
                                    const LossFunction& loss,
                                    double grad_scale) const;

 private:
  at::Tensor pad(const std::vector<at::Tensor>& rows) const;

  const RolloutBatch& batch_;
  std::vector<Partition> parts_;
  const models::ParallelState& mesh_;
  VisualInputs visual_;
  std::vector<models::SequencePartition> packs_;
  std::int64_t batch_num_tokens_ = 0;
  std::int64_t global_batch_size_ = 0;
};

}  // namespace ferry::trainer
