// Log-probabilities and entropies of the tokens of finished responses, through all stages of a
// pipeline (verl's compute_log_prob): old, reference and new policies are compared by them. In
// kBitwise they do not depend on the mesh, nor on how the sequences are cut into micro-batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"
#include "trainer/engine/visual_inputs.h"
#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

struct LogProbs {
  at::Tensor log_probs{};       // [response tokens], fp32, on the host
  at::Tensor entropys{};        // the same
  at::Tensor routed_experts{};  // [tokens, layers with experts, topk], if they are recorded
};

// Called by all ranks of the mesh, with the rows of their data parallel rank: prompts have one
// token at least, responses may have none. `parts`: the rows of each micro-batch, every row in one,
// as many parts on all ranks. Logits are divided by the temperature; a token that the batch's
// sampling mask leaves out has probability 0. Tokens go where batch.routed_experts says; if it is
// not known and `record_routes`, the experts that routers choose are returned. The same on all
// ranks of a data parallel rank. `visual`: images of the rows.
LogProbs compute_log_prob(const Pipeline& pipeline,
                          const RolloutBatch& batch,
                          const std::vector<Partition>& parts,
                          double temperature = 1,
                          bool record_routes = false,
                          const VisualInputs& visual = {});

}  // namespace ferry::trainer
