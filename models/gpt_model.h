// A GPT model, or the stage of one that a rank has, for every family that is converted: dense, with
// experts, with latent attention, shared experts, prediction layers, a language model's head or a
// value's. Weights come and go by its sharded_state_dict().
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "models/decode_row/row_decoder.h"
#include "models/distributed/parallel_state.h"
#include "models/spec/alignment.h"
#include "models/spec/transformer_config.h"
#include "models/tensor_parallel/cross_entropy.h"
#include "models/tensor_parallel/parameters.h"
#include "models/transformer/layer_context.h"
#include "models/transformer/packed_sequences.h"
#include "models/transformer/transformer_layer.h"

namespace ferry::models {

struct ModelOptions {
  Alignment alignment = Alignment::kFast;
  distckpt::DType dtype = distckpt::DType::kBF16;
  bool sequence_parallel = false;  // of tensor parallel ranks, between the layers
  // Whether gradients have the same bits at every run also in kFast, where attention's backward on
  // a GPU is up to three times as fast without.
  bool deterministic_mode = true;
  Recompute recompute{};

  LayoutOptions layout() const { return {.alignment = alignment, .dtype = dtype}; }
};

class GPTModel {
 public:
  // The chunk `stage` of stage_chunks(). The mesh outlives the model. Throws Error(kUsage) if the
  // model cannot be split so, or not be bitwise in its dtype on this device.
  GPTModel(TransformerConfig config,
           const ParallelState& mesh,
           StageSpec stage,
           ModelOptions options);
  GPTModel(const GPTModel&) = delete;
  GPTModel& operator=(const GPTModel&) = delete;

  // `hidden`: of the stage before, undefined on the first. Returns what the next stage takes, and
  // on the last stage the normed hidden states: [tokens, hidden], this rank's part of the batch.
  at::Tensor forward(const SequencePartition& batch,
                     const at::Tensor& hidden = {},
                     const Observer& observe = {},
                     const RouterReplay& routes = {}) const;

  // One step of generation: tokens and positions [rows], int64 on the device, of the sequences that
  // `inference` knows -> the normed hidden states [rows, hidden]. Tensor parallel ranks, whose rows
  // are the same, share them out to routers as `routes` says. Reads nothing back to the host in
  // models without experts. Throws Error(kUsage) unless this is a whole model, and without context
  // or sequence parallelism.
  at::Tensor forward(const at::Tensor& tokens,
                     const at::Tensor& positions,
                     InferenceContext& inference,
                     const RouterReplay& routes = {}) const;

  // Of the last stage's hidden states: logits of this rank's part of the padded vocabulary [local,
  // vocab/tp], or of a classification head all of [local, num_labels].
  at::Tensor output(const at::Tensor& hidden) const;
  // The same of the whole padded vocabulary, [local, padded], on every tensor parallel rank.
  at::Tensor whole_output(const at::Tensor& hidden) const;
  // Of the last stage's hidden states and `labels` [local]: SequencePartition::local() of the
  // tokens that come next. `scored`: the rows of these that have logits, as SequencePartition has
  // them; of others the results are zeros, and so is the gradient. `mask`: of these rows, as it has
  // them, too. The logits are never held whole.
  // Results are [local], the same on all tensor parallel ranks. Throws Error(kUsage) if the head is
  // not a language model's.
  TokenLogProbs log_probs(const at::Tensor& hidden,
                          const at::Tensor& labels,
                          double temperature = 1,
                          const at::Tensor& scored = {},
                          const SamplingMask& mask = {}) const;
  CrossEntropy cross_entropy(const at::Tensor& hidden,
                             const at::Tensor& labels,
                             const at::Tensor& token_weights,
                             const at::Tensor& scored = {}) const;
  // The logits of the whole vocabulary, without padding, of the whole batch in the order of the
  // pack: [tokens, vocab], on every rank of the stage.
  at::Tensor all_logits(const at::Tensor& hidden, const SequencePartition& batch) const;

  // Rows as they are between the layers -> those of the whole batch in the order of the pack.
  at::Tensor whole_batch(const at::Tensor& between_layers, const SequencePartition& batch) const;

  // What the prediction layers of this chunk make of the last stage's normed hidden states, each of
  // what the one before it gave: as output() takes them. At position t of its sequence the i-th,
  // from 0, predicts token t + i + 2; at its last i + 1 positions nothing.
  std::vector<at::Tensor> predict(const at::Tensor& hidden, const SequencePartition& batch) const;

  const TransformerConfig& config() const { return config_; }
  const StageSpec& stage() const { return stage_; }
  const ModelOptions& options() const { return options_; }
  const std::vector<int>& embedding_stages() const { return embedding_stages_; }
  const ParallelState& mesh() const { return mesh_; }
  Parameters& parameters() { return parameters_; }
  const Parameters& parameters() const { return parameters_; }
  std::vector<distckpt::LocalShard> sharded_state_dict() const {
    return parameters_.sharded_state_dict();
  }

 private:
  OutputHead head() const;
  ResidualStream run_layers(ResidualStream stream, const LayerContext& context) const;
  ResidualStream recompute_layers(std::size_t first,
                                  std::size_t count,
                                  const ResidualStream& stream,
                                  const LayerContext& context) const;

  TransformerConfig config_;
  const ParallelState& mesh_;
  StageSpec stage_;
  ModelOptions options_;
  std::vector<int> embedding_stages_;
  Parameters parameters_;
  ModelSetup setup_;
  RotaryEmbedding rotary_;

  std::optional<VocabParallelEmbedding> embedding_;
  std::vector<TransformerLayer> layers_;
  std::vector<MultiTokenPredictionLayer> predictions_;
  std::unique_ptr<RowDecoder> row_decoder_;  // null where there is none
  at::Tensor final_norm_, output_weight_, output_bias_;
};

}  // namespace ferry::models
