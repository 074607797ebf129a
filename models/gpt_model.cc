#include "models/gpt_model.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "models/kernels/attention/paged_attention.h"
#include "models/kernels/delta/delta_cuda.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/rms_norm.h"
#include "models/kernels/whole_vectors.h"
#include "models/tensor_parallel/mappings.h"
#include "models/vision/vision_model.h"

namespace ferry::models {

namespace {

at::Tensor rows_of(const at::Tensor& all, const at::Tensor& rows) {
  return rows.defined() ? all.index_select(0, rows) : all;
}

// Scatters [rows] into zeros: [count].
at::Tensor among_all(const at::Tensor& of_rows, const at::Tensor& rows, std::int64_t count) {
  if (!rows.defined()) return of_rows;
  return at::zeros({count}, of_rows.options()).index_copy(0, rows, of_rows);
}

// Refuses models some of whose rows have other bits beside other rows, by any kernel there is.
void require_bitwise_on_gpu(const TransformerConfig& config,
                            distckpt::DType dtype,
                            at::Device device) {
  require(dtype == distckpt::DType::kBF16, ErrorKind::kUsage,
          "{} on a GPU is not bitwise: no attention kernel keeps its rows (docs/numerics.md)",
          short_name(dtype));
  const auto dim = config.kv_channels;
  require(!config.softmax_offset || paged_attention_cuda_supports(device, at::kBFloat16, dim, dim),
          ErrorKind::kUsage,
          "heads of {} channels with sinks are not bitwise on a GPU: the kernel takes 64 or 128 "
          "(docs/numerics.md)",
          dim);
  require(!config.attn_logit_softcapping, ErrorKind::kUsage,
          "attention with soft caps is not bitwise on a GPU: no kernel keeps its rows "
          "(docs/numerics.md)");
  require(!config.has_linear_attention() ||
              delta_cuda_supports(config.linear_key_head_dim, config.linear_value_head_dim,
                                  config.linear_conv_kernel_dim),
          ErrorKind::kUsage,
          "gated delta nets with heads of {} and {} channels and {} taps are not bitwise on a GPU: "
          "the kernel takes heads of 128 and up to 4 taps (docs/numerics.md)",
          config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_kernel_dim);
}

}  // namespace

GPTModel::GPTModel(TransformerConfig config,
                   const ParallelState& mesh,
                   StageSpec stage,
                   ModelOptions options)
    : config_(std::move(config)),
      mesh_(mesh),
      stage_(std::move(stage)),
      options_(options),
      embedding_stages_(models::embedding_stages(config_, mesh.shape().parallel())),
      parameters_(
          parameter_layout(config_, mesh.shape(), mesh.coordinates(), stage_, options.layout()),
          mesh.world().device()),
      setup_{.config = config_,
             .mesh = mesh_,
             .tensor_parallel = {.group = &mesh_.tp(),
                                 .sequence_parallel = options.sequence_parallel,
                                 .alignment = options.alignment},
             .deterministic = options.deterministic_mode,
             .recompute = options.recompute},
      position_embedding_(config_, mesh.world().device()) {
  if (options.alignment == Alignment::kBitwise && mesh.world().device().is_cuda())
    require_bitwise_on_gpu(config_, options.dtype, mesh.world().device());
  require(options.recompute.num_layers > 0, ErrorKind::kUsage,
          "recompute_num_layers is {}: it has to be positive", options.recompute.num_layers);
  const auto between = setup_.tensor_parallel.between_layers();
  if (options_.vision_tower && stage_.pre_process && config_.computes_vision())
    vision_ = std::make_unique<VisionModel>(config_, mesh_, options_.alignment, parameters_);
  if (parameters_.has("embedding.word_embeddings.weight"))
    embedding_.emplace(setup_.tensor_parallel, parameters_, "embedding.word_embeddings");
  for (const auto layer : stage_.layers) {
    layers_.emplace_back(setup_, parameters_, fmt::format("decoder.layers.{}.", layer), layer,
                         config_.is_moe_layer(layer));
  }
  for (const auto layer : stage_.mtp) predictions_.emplace_back(setup_, parameters_, layer);
  if (stage_.post_process) {
    final_norm_ = parameters_.take("decoder.final_layernorm.weight", between);
    const bool tied =
        config_.head == Head::kLanguageModel && !config_.untie_embeddings_and_output_weights;
    output_weight_ = tied ? embedding_->weight() : parameters_.take("output_layer.weight", between);
    output_bias_ = parameters_.take_if("output_layer.bias", between);
  }
  parameters_.check_all_taken();
  row_decoder_ = RowDecoder::make(config_, mesh_, options_.alignment, parameters_);
}

GPTModel::~GPTModel() = default;

at::Tensor GPTModel::forward(const SequencePartition& batch,
                             const at::Tensor& hidden,
                             const Observer& observe,
                             const RouterReplay& routes,
                             const VisualRows& visual) const {
  const auto images = between_layers(visual, batch);
  const LayerContext context{.batch = &batch,
                             .positions = positions_of(batch),
                             .observe = observe,
                             .routes = routes,
                             .visual = images.any() ? &images : nullptr};
  require(stage_.pre_process != hidden.defined(), ErrorKind::kBug,
          "the first stage takes tokens, the others hidden states");
  ResidualStream stream{.sum = stage_.pre_process ? embed(batch.tokens()) : hidden};
  if (stage_.pre_process && images.any()) stream.sum = images.embed(stream.sum);
  if (observe && stage_.pre_process) observe("embedding", stream.sum);
  stream = run_layers(std::move(stream), context);
  if (!stage_.post_process) return stream.total();
  auto x = add_and_norm(stream, final_norm_, config_.layernorm_epsilon, config_.norm_rounding());
  if (observe) observe("decoder.final_layernorm", x);
  return x;
}

at::Tensor GPTModel::forward(const at::Tensor& tokens,
                             const at::Tensor& positions,
                             InferenceContext& inference,
                             const RouterReplay& routes,
                             const VisualRows& visual) const {
  require(stage_.pre_process && stage_.post_process && !options_.sequence_parallel &&
              mesh_.shape().cp() == 1,
          ErrorKind::kUsage,
          "generation takes whole models: no pipeline, no context or sequence parallelism");
  const LayerContext context{
      .positions = position_embedding_.angles(positions, scalar_type(options_.dtype)),
      .inference = &inference,
      .routes = routes,
      .visual = visual.any() ? &visual : nullptr};
  auto embedded = embed(tokens);
  if (visual.any()) embedded = visual.embed(embedded);
  const auto row = row_decoder_ ? inference.only_row() : std::nullopt;
  auto stream = row && row_decoder_->takes(*row)
                    ? row_decoder_->forward(embedded, context.positions.angles, *row)
                    : run_layers({.sum = embedded}, context);
  return add_and_norm(stream, final_norm_, config_.layernorm_epsilon, config_.norm_rounding());
}

PositionAngles GPTModel::positions_of(const SequencePartition& batch) const {
  const bool by_length = config_.rope_scaling.type == RopeType::kLongrope;
  return position_embedding_.angles(batch.positions(), scalar_type(options_.dtype),
                                    by_length ? batch.sequence_lengths() : at::Tensor());
}

// transformers rounds the root to the dtype of the weights, and no embedding_multiplier.
at::Tensor GPTModel::embed(const at::Tensor& tokens) const {
  auto embedded = embedding_->forward(tokens);
  if (config_.embedding_multiplier != 1) return embedded * config_.embedding_multiplier;
  if (!config_.embedding_scaling) return embedded;
  const auto root = at::scalar_tensor(std::sqrt(static_cast<double>(config_.hidden_size)));
  return embedded * root.to(embedded.scalar_type()).item<double>();
}

// Ranks that share rows give each other the gradients of their images: each row is one rank's, so
// that all have the whole, exactly.
VisualRows GPTModel::between_layers(const VisualRows& visual,
                                    const SequencePartition& batch) const {
  if (!options_.sequence_parallel || !visual.any()) return visual;
  const auto count = batch.tokens().size(0) / mesh_.tp().size();
  const auto begin = mesh_.tp().rank() * count;
  if (!visual.embeddings.requires_grad()) return visual.part(begin, count);
  auto features = visual.deepstack;
  features.push_back(visual.embeddings);
  auto shared = copy_to_tensor_model_parallel_region(at::stack(features), mesh_.tp()).unbind(0);
  VisualRows whole{.rows = visual.rows, .embeddings = shared.back()};
  shared.pop_back();
  whole.deepstack = std::move(shared);
  return whole.part(begin, count);
}

ResidualStream GPTModel::run_layer(std::size_t index,
                                   ResidualStream stream,
                                   const LayerContext& context) const {
  stream = layers_[index].forward(std::move(stream), context);
  const auto* const visual = context.visual;
  const auto layer = stage_.layers[index];
  if (visual == nullptr || !visual->adds_to(layer)) return stream;
  return {.sum = visual->add(layer, stream.total())};
}

ResidualStream GPTModel::run_layers(ResidualStream stream, const LayerContext& context) const {
  const auto& options = options_.recompute;
  const bool full = options.granularity == Recompute::Granularity::kFull && !context.observe &&
                    context.inference == nullptr;
  const bool uniform = options.method == Recompute::Method::kUniform;
  const auto num_layers = static_cast<std::size_t>(options.num_layers);
  for (std::size_t i = 0; i < layers_.size();) {
    if (full && (uniform || i < num_layers)) {
      const auto count = uniform ? std::min(num_layers, layers_.size() - i) : 1;
      stream = recompute_layers(i, count, stream, context);
      i += count;
    } else {
      stream = run_layer(i++, std::move(stream), context);
    }
  }
  return stream;
}

ResidualStream GPTModel::recompute_layers(std::size_t first,
                                          std::size_t count,
                                          const ResidualStream& stream,
                                          const LayerContext& context) const {
  // Features that these layers add have gradients, too: they go in like the stream.
  VisualRows images;
  std::vector<at::Tensor> features;
  for (auto i = first; context.visual != nullptr && i < first + count; ++i) {
    const auto layer = static_cast<std::size_t>(stage_.layers[i]);
    if (!context.visual->adds_to(stage_.layers[i])) continue;
    images.rows = context.visual->rows;
    images.deepstack.resize(layer + 1);
    features.push_back(context.visual->deepstack[layer]);
  }
  const bool pending = stream.pending.defined();
  const auto layers = [this, first, count, batch = *context.batch, positions = context.positions,
                       routes = context.routes, images, pending,
                       num_features = features.size()](const std::vector<at::Tensor>& inputs) {
    ResidualStream x{.sum = inputs[0], .pending = pending ? inputs[1] : at::Tensor()};
    auto visual = images;
    std::copy(inputs.end() - static_cast<std::ptrdiff_t>(num_features), inputs.end(),
              visual.deepstack.end() - static_cast<std::ptrdiff_t>(num_features));
    const LayerContext again{.batch = &batch,
                             .positions = positions,
                             .routes = routes,
                             .visual = visual.any() ? &visual : nullptr};
    for (auto i = first; i < first + count; ++i) x = run_layer(i, std::move(x), again);
    return x.pending.defined() ? std::vector{x.sum, x.pending} : std::vector{x.sum};
  };
  std::vector<at::Tensor> inputs{stream.sum};
  if (pending) inputs.push_back(stream.pending);
  inputs.insert(inputs.end(), features.begin(), features.end());
  const auto outputs = recompute(layers, inputs);
  return {.sum = outputs[0], .pending = outputs.size() > 1 ? outputs[1] : at::Tensor()};
}

at::Tensor GPTModel::output(const at::Tensor& hidden) const {
  const auto& parallel = setup_.tensor_parallel;
  if (config_.head == Head::kLanguageModel) {
    const auto products = linear(parallel.enter(hidden), output_weight_, {}, options_.alignment);
    return soft_capped(config_.logits_scaling == 1 ? products : products / config_.logits_scaling,
                       config_.final_logit_softcapping);
  }
  const auto scores = linear_head(hidden, output_weight_, output_bias_, options_.alignment);
  return parallel.sequence_parallel
             ? gather_from_sequence_parallel_region(scores, mesh_.tp(), /*replicated=*/true)
             : scores;
}

OutputHead GPTModel::head() const {
  require(config_.head == Head::kLanguageModel, ErrorKind::kUsage,
          "a model with a value head has no log-probabilities of tokens");
  return {.weight = output_weight_,
          .vocab_size = config_.vocab_size,
          .logits_scaling = config_.logits_scaling,
          .softcap = config_.final_logit_softcapping,
          .parallel = setup_.tensor_parallel};
}

TokenLogProbs GPTModel::log_probs(const at::Tensor& hidden,
                                  const at::Tensor& labels,
                                  double temperature,
                                  const at::Tensor& scored,
                                  const SamplingMask& mask) const {
  const auto of_scored = linear_log_probs(rows_of(setup_.tensor_parallel.enter(hidden), scored),
                                          rows_of(labels, scored), head(), temperature, mask);
  return {.log_probs = among_all(of_scored.log_probs, scored, labels.size(0)),
          .entropy = among_all(of_scored.entropy, scored, labels.size(0))};
}

CrossEntropy GPTModel::cross_entropy(const at::Tensor& hidden,
                                     const at::Tensor& labels,
                                     const at::Tensor& token_weights,
                                     const at::Tensor& scored) const {
  const auto of_scored =
      linear_cross_entropy(rows_of(setup_.tensor_parallel.enter(hidden), scored),
                           rows_of(labels, scored), rows_of(token_weights, scored), head());
  return {.loss = of_scored.loss,
          .log_probs = among_all(of_scored.log_probs, scored, labels.size(0))};
}

at::Tensor GPTModel::whole_output(const at::Tensor& hidden) const {
  auto mine = output(hidden);
  if (config_.head != Head::kLanguageModel) return mine;
  return gather_from_tensor_model_parallel_region(mine, mesh_.tp());
}

at::Tensor GPTModel::all_logits(const at::Tensor& hidden, const SequencePartition& batch) const {
  auto logits = whole_output(hidden);
  if (config_.head == Head::kLanguageModel) logits = logits.narrow(1, 0, config_.vocab_size);
  return batch
      .in_pack_order(gather_from_sequence_parallel_region(logits, mesh_.cp(), /*replicated=*/true))
      .narrow(0, 0, batch.num_tokens());
}

at::Tensor GPTModel::whole_batch(const at::Tensor& between_layers,
                                 const SequencePartition& batch) const {
  const auto local =
      options_.sequence_parallel ? mesh_.tp().all_gather(between_layers) : between_layers;
  return batch.in_pack_order(mesh_.cp().all_gather(local)).narrow(0, 0, batch.num_tokens());
}

std::vector<at::Tensor> GPTModel::predict(const at::Tensor& hidden,
                                          const SequencePartition& batch) const {
  const LayerContext context{.batch = &batch, .positions = positions_of(batch)};
  std::vector<at::Tensor> predicted;
  auto x = hidden;
  for (std::size_t i = 0; i < predictions_.size(); ++i) {
    const auto behind = batch.tokens_behind(static_cast<std::int64_t>(i) + 1);
    x = predictions_[i].forward(x, embed(behind), context);
    predicted.push_back(x);
  }
  return predicted;
}

}  // namespace ferry::models
