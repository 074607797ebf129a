// Scores of finished sequences by a model with a head of one score, through all stages of a
// pipeline: a critic's values of every token (verl's compute_values), a reward model's score of the
// whole (verl's compute_rm_score). In kBitwise neither depends on the mesh, nor on how the
// sequences are cut into micro-batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"
#include "trainer/engine/visual_inputs.h"

namespace ferry::trainer {

// Throws Error(kUsage) unless the model is a critic: a token classification of one label.
void require_value_head(const Pipeline& pipeline);

// Called as forward_sequences() is. [tokens] of each sequence, fp32, on the host: at place t the
// value of what comes after token t, so that the value that belongs to a token of an answer stands
// at the token before it. Throws Error(kUsage) unless the head is a token classification of one
// label.
std::vector<at::Tensor> compute_values(const Pipeline& pipeline,
                                       const std::vector<at::Tensor>& sequences,
                                       const std::vector<Partition>& parts,
                                       const VisualInputs& visual = {});

// [sequences], fp32, on the host: the scores at their last tokens. Throws Error(kUsage) unless the
// head is a classification of sequences or tokens of one label.
at::Tensor compute_rm_score(const Pipeline& pipeline,
                            const std::vector<at::Tensor>& sequences,
                            const std::vector<Partition>& parts,
                            const VisualInputs& visual = {});

}  // namespace ferry::trainer
