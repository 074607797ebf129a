#include "tests/support/models/tiny_training.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#include <functional>

#include "converter/open/checkpoint.h"
#include "models/tensor_parallel/mappings.h"
#include "models/tensor_parallel/parameters.h"
#include "tests/support/temp_dir.h"

namespace ferry::support {
namespace {

at::Tensor part_of(at::Tensor tensor, const distckpt::Box& box) {
  for (int d = 0; d < box.rank(); ++d) tensor = tensor.narrow(d, box.offset[d], box.size[d]);
  return tensor;
}

at::IntArrayRef sizes(const distckpt::Shape& shape) {
  return {shape.begin(), shape.end()};
}

}  // namespace

models::TransformerConfig tiny_config(const TinyModel& model) {
  const TempDir folder;
  write_tiny_model(model, folder.path(), 1);
  return converter::open(folder.path()).map.config;
}

void make_gpt_oss(models::TransformerConfig& config) {
  config.softmax_offset = true;
  config.traits.norms_round_once = true;
  config.add_bias_linear = true;
  config.window_attn_skip_freq = {true, false};
  config.activation = models::Activation::kQuickGeglu;
  config.glu_linear_offset = 1;
  config.activation_func_clamp_value = 7;
}

void make_hybrid(models::TransformerConfig& config) {
  config.linear_attention_freq.assign(static_cast<std::size_t>(config.num_layers), true);
  config.linear_attention_freq.back() = false;
  config.linear_conv_kernel_dim = 4;
  config.linear_key_head_dim = 16;
  config.linear_value_head_dim = 24;
  config.linear_num_key_heads = 2;
  config.linear_num_value_heads = 4;
  config.attention_output_gate = true;
  config.layernorm_zero_centered_gamma = true;
  config.rotary_percent = 0.25;
}

void fill_parameters(models::GPTModel& model, std::uint64_t seed) {
  for (const auto& parameter : model.parameters().all()) {
    const auto& spec = parameter.spec;
    const auto random =
        at::make_generator<at::CPUGeneratorImpl>(seed ^ std::hash<std::string>()(spec.key));
    auto whole = at::randn(sizes(spec.global_shape), random);
    whole = spec.shape.rank() == 1 && spec.key.ends_with("weight") ? 1 + 0.1 * whole : 0.2 * whole;
    if (spec.vocab >= 0 && spec.vocab < whole.size(0))
      whole.narrow(0, spec.vocab, whole.size(0) - spec.vocab).zero_();
    std::vector<at::Tensor> mine;
    for (const auto& box : spec.boxes) mine.push_back(part_of(whole, box));
    parameter.value.copy_(at::cat(mine));
  }
}

std::vector<at::Tensor> random_sequences(const std::vector<std::int64_t>& lengths,
                                         std::int64_t vocab,
                                         std::uint64_t seed) {
  const auto random = at::make_generator<at::CPUGeneratorImpl>(seed);
  std::vector<at::Tensor> sequences;
  for (const auto length : lengths)
    sequences.push_back(
        at::randint(0, vocab, {length}, random, at::TensorOptions().dtype(at::kLong)));
  return sequences;
}

at::Tensor token_loss(const models::GPTModel& model,
                      const at::Tensor& hidden,
                      const models::SequencePartition& batch,
                      double normaliser) {
  const auto logits =
      models::gather_from_tensor_model_parallel_region(model.output(hidden), model.mesh().tp());
  const auto log_probs =
      at::log_softmax(logits.narrow(1, 0, model.config().vocab_size).to(at::kFloat), 1);
  return -log_probs.gather(1, batch.tokens().unsqueeze(1)).sum() / normaliser;
}

void WholeTensors::add(const models::ParameterSpec& spec, const at::Tensor& part) {
  const std::lock_guard lock(mutex_);
  auto& whole = tensors_[spec.key];
  if (!whole.defined()) whole = at::zeros(sizes(spec.global_shape), part.scalar_type());
  std::int64_t row = 0;
  for (const auto& box : spec.boxes) {
    part_of(whole, box).copy_(part.narrow(0, row, box.size[0]));
    row += box.size[0];
  }
}

void WholeTensors::add(const distckpt::LocalShard& shard) {
  const std::lock_guard lock(mutex_);
  auto& whole = tensors_[shard.tensor.key];
  if (!whole.defined()) whole = at::zeros(sizes(shard.tensor.global_shape), at::kFloat);
  part_of(whole, shard.tensor.box())
      .copy_(at::from_blob(shard.data, sizes(shard.tensor.local_shape), sizes(shard.strides),
                           models::scalar_type(shard.tensor.dtype)));
}

std::string first_difference(const WholeTensors& got,
                             const WholeTensors& expected,
                             double tolerance) {
  if (got.all().size() != expected.all().size())
    return fmt::format("{} tensors, not {}", got.all().size(), expected.all().size());
  for (const auto& [key, tensor] : expected.all()) {
    const auto found = got.all().find(key);
    if (found == got.all().end()) return key + " is missing";
    // Padding of the vocabulary differs from mesh to mesh.
    const auto rows = std::min(tensor.size(0), found->second.size(0));
    const auto a = found->second.narrow(0, 0, rows).to(at::kDouble);
    const auto b = tensor.narrow(0, 0, rows).to(at::kDouble);
    if (tolerance == 0 && at::equal(a, b)) continue;
    const auto difference = (a - b).abs().max().item<double>();
    if (difference > tolerance * b.abs().max().item<double>() || (tolerance == 0))
      return fmt::format("{} by {}", key, difference);
  }
  return "";
}

}  // namespace ferry::support
