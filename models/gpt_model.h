// A GPT model, or the stage of one that a rank has, for every family that is converted: dense, with
// experts, with latent attention, shared experts, prediction layers, a language model's head or a
// value's. Weights are loaded and saved through sharded_state_dict().
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
  // True if gradients have the same bits at every run in kFast, too. Attention's backward on a GPU
  // is up to three times as fast without it. kBitwise always has it.
  bool deterministic_mode = true;
  Recompute recompute{};
  bool vision_tower = false;  // LayoutOptions: it is trained, or follows one that is

  LayoutOptions layout() const {
    return {.alignment = alignment, .dtype = dtype, .vision_tower = vision_tower};
  }
};

class VisionModel;  // models/vision

class GPTModel {
 public:
  // `stage` is one of stage_chunks(). The mesh must outlive the model. Throws Error(kUsage) if the
  // model cannot be split so, or cannot be bitwise in its dtype on this device.
  GPTModel(TransformerConfig config,
           const ParallelState& mesh,
           StageSpec stage,
           ModelOptions options);
  ~GPTModel();
  GPTModel(const GPTModel&) = delete;
  GPTModel& operator=(const GPTModel&) = delete;

  // `hidden` is the output of the stage before, undefined on the first. Returns the input of the
  // next stage, or on the last stage the normed hidden states: [tokens, hidden], this rank's part
  // of the batch. `visual` are rows of images, SequencePartition::local(): with gradient where the
  // chunk has the tower that made them.
  at::Tensor forward(const SequencePartition& batch,
                     const at::Tensor& hidden = {},
                     const Observer& observe = {},
                     const RouterReplay& routes = {},
                     const VisualRows& visual = {}) const;

  // Computes one step of generation: tokens and positions [rows], int64 on the device (positions
  // [3, rows] where tokens have one in time, height and width), of the sequences that `inference`
  // holds -> the normed hidden states [rows, hidden]. Tensor parallel ranks have the same rows, and
  // share them out to the routers as `routes` says. `visual` are rows of images. Reads nothing back
  // to the host in models without experts. Throws Error(kUsage) unless this is a whole model, and
  // without context or sequence parallelism.
  at::Tensor forward(const at::Tensor& tokens,
                     const at::Tensor& positions,
                     InferenceContext& inference,
                     const RouterReplay& routes = {},
                     const VisualRows& visual = {}) const;

  // Logits of the last stage's hidden states: this rank's part of the padded vocabulary, [local,
  // vocab/tp], or all of a classification head's, [local, num_labels].
  at::Tensor output(const at::Tensor& hidden) const;
  // Logits over the whole padded vocabulary, [local, padded], on every tensor parallel rank.
  at::Tensor whole_output(const at::Tensor& hidden) const;
  // Log-probabilities of `labels` [local], SequencePartition::local() of the tokens that come next,
  // and entropies, from the last stage's hidden states. `scored` and `mask` are
  // SequencePartition's: only the scored rows get logits, the others have zeros as results and
  // gradients. The logits are never held whole. Results are [local], the same on all tensor
  // parallel ranks. Throws Error(kUsage) if the head is not a language model's.
  TokenLogProbs log_probs(const at::Tensor& hidden,
                          const at::Tensor& labels,
                          double temperature = 1,
                          const at::Tensor& scored = {},
                          const SamplingMask& mask = {}) const;
  CrossEntropy cross_entropy(const at::Tensor& hidden,
                             const at::Tensor& labels,
                             const at::Tensor& token_weights,
                             const at::Tensor& scored = {}) const;
  // Logits of the whole batch over the vocabulary without padding, in the order of the pack:
  // [tokens, vocab], on every rank of the stage.
  at::Tensor all_logits(const at::Tensor& hidden, const SequencePartition& batch) const;

  // Gathers this rank's rows, as they are between the layers -> rows of the whole batch in the
  // order of the pack.
  at::Tensor whole_batch(const at::Tensor& between_layers, const SequencePartition& batch) const;

  // Runs the prediction layers of this chunk on the last stage's normed hidden states, each on the
  // result of the one before it. Returns one tensor for each layer, as output() takes it. At
  // position t of a sequence, layer i (from 0) predicts token t + i + 2; its last i + 1 positions
  // predict nothing.
  std::vector<at::Tensor> predict(const at::Tensor& hidden, const SequencePartition& batch) const;

  const TransformerConfig& config() const { return config_; }
  const StageSpec& stage() const { return stage_; }
  const ModelOptions& options() const { return options_; }
  const std::vector<int>& embedding_stages() const { return embedding_stages_; }
  const ParallelState& mesh() const { return mesh_; }
  const VisionModel* vision() const { return vision_.get(); }  // null where the chunk has none
  Parameters& parameters() { return parameters_; }
  const Parameters& parameters() const { return parameters_; }
  std::vector<distckpt::LocalShard> sharded_state_dict() const {
    return parameters_.sharded_state_dict();
  }

 private:
  OutputHead head() const;
  PositionAngles positions_of(const SequencePartition& batch) const;
  // tokens [tokens] -> [tokens, hidden], as it is between the layers.
  at::Tensor embed(const at::Tensor& tokens) const;
  // The layer `index` of this stage, and what images add behind it.
  ResidualStream run_layer(std::size_t index,
                           ResidualStream stream,
                           const LayerContext& context) const;
  // Rows of images among those that this rank has between the layers.
  VisualRows between_layers(const VisualRows& visual, const SequencePartition& batch) const;
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
  PositionEmbedding position_embedding_;

  std::unique_ptr<VisionModel> vision_;
  std::optional<VocabParallelEmbedding> embedding_;
  std::vector<TransformerLayer> layers_;
  std::vector<MultiTokenPredictionLayer> predictions_;
  std::unique_ptr<RowDecoder> row_decoder_;  // null where there is none
  at::Tensor final_norm_, output_weight_, output_bias_;
};

}  // namespace ferry::models
