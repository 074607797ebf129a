#include "models/decode_row/row_decoder.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <utility>

#include "models/decode_row/decode_row_launch.h"
#include "models/distributed/world.h"
#include "models/kernels/cuda/cuda_call.h"
#include "models/peer/peer_memory.h"

namespace ferry::models {
namespace {

// This rank's part of the model.
launch::DecodeRowShape shape_of(const TransformerConfig& config, const ProcessGroup& tp) {
  const auto part = [&](std::int64_t all) { return static_cast<int>(all / tp.size()); };
  return {.ranks = tp.size(),
          .rank = tp.rank(),
          .layers = static_cast<int>(config.num_layers),
          .hidden = static_cast<int>(config.hidden_size),
          .ffn = part(config.ffn_hidden_size),
          .heads = part(config.num_attention_heads),
          .groups = part(config.num_query_groups),
          .dim = static_cast<int>(config.kv_channels),
          .window = static_cast<int>(config.sliding_window.value_or(0)),
          .epsilon = static_cast<float>(config.layernorm_epsilon),
          .scale = static_cast<float>(softmax_scale(config))};
}

bool is_aligned(const at::Tensor& x) {
  constexpr std::uintptr_t kAlignment = 16;
  return x.is_contiguous() &&
         reinterpret_cast<std::uintptr_t>(x.const_data_ptr()) % kAlignment == 0;
}

}  // namespace

std::unique_ptr<RowDecoder> RowDecoder::make(const TransformerConfig& config,
                                             const ParallelState& mesh,
                                             Alignment alignment,
                                             const Parameters& parameters) {
  const auto device = mesh.world().device();
  const auto& tp = mesh.tp();
  if (!device.is_cuda() || alignment != Alignment::kFast || mesh.shape().pp() > 1 ||
      config.num_query_groups % tp.size() != 0 || config.num_moe_experts > 0 ||
      config.multi_latent_attention || config.rotary_percent < 1 || config.rotary_interleaved ||
      config.attention_output_gate || config.has_linear_attention() ||
      config.post_norm != PostNorm::kNone || config.add_bias_linear ||
      config.activation != Activation::kSilu || !config.pre_norm ||
      config.norm_rounding() != NormRounding::kBeforeWeight || config.has_local_rotary() ||
      !config.no_rope_freq.empty() || config.traits.rotary_in_fp32 || config.softmax_scale ||
      config.attn_logit_softcapping || !config.window_attn_skip_freq.empty() ||
      config.rope_scaling.llama_4_scaling_beta || config.head != Head::kLanguageModel)
    return nullptr;
  for (const auto& parameter : parameters.all())
    if (parameter.value.scalar_type() != at::kBFloat16) return nullptr;
  const c10::cuda::CUDAGuard guard(device);
  const auto shape = shape_of(config, tp);
  if (!launch::decode_row_fits(shape)) return nullptr;
  return std::unique_ptr<RowDecoder>(
      new RowDecoder(config, tp, parameters,
                     at::zeros({launch::decode_row_exchange(shape)},
                               at::TensorOptions().device(device).dtype(at::kByte))));
}

RowDecoder::RowDecoder(const TransformerConfig& config,
                       const ProcessGroup& tp,
                       const Parameters& parameters,
                       at::Tensor exchange)
    : config_(config), tp_(tp), parameters_(parameters), exchange_(std::move(exchange)) {}

bool RowDecoder::takes(const DecodedRow& row) const {
  if (tp_.size() > 1 && tp_.peer_memory() == nullptr) return false;
  auto shape = shape_of(config_, tp_);
  shape.max_blocks = static_cast<int>(row.block_table.numel());
  for (const auto& parameter : parameters_.all())
    if (!is_aligned(parameter.value)) return false;
  return launch::decode_row_fits(shape);
}

const void* RowDecoder::weight(std::int64_t layer, const char* name) const {
  const auto value = parameters_.value_if(fmt::format("decoder.layers.{}.{}", layer, name));
  return value.defined() ? value.const_data_ptr() : nullptr;
}

ResidualStream RowDecoder::forward(const at::Tensor& hidden,
                                   const RotaryAngles& angles,
                                   const DecodedRow& row) const {
  require(hidden.size(0) == 1 && angles.style == RotaryStyle::kHalves, ErrorKind::kBug,
          "the kernel of one row was given {}", hidden.size(0));
  const c10::cuda::CUDAGuard guard(hidden.device());
  launch::DecodeRow kernel{.shape = shape_of(config_, tp_),
                           .hidden = hidden.const_data_ptr(),
                           .cos = angles.cos.const_data_ptr(),
                           .sin = angles.sin.const_data_ptr(),
                           .block_table = row.block_table.const_data_ptr<std::int32_t>(),
                           .length = row.length.const_data_ptr<std::int32_t>(),
                           .slot = row.slot.const_data_ptr<std::int64_t>()};
  kernel.shape.max_blocks = static_cast<int>(row.block_table.numel());
  for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) {
    const auto& [key, value] = row.cache[static_cast<std::size_t>(layer)];
    kernel.layers[layer] = {
        .weights = {weight(layer, "self_attention.linear_qkv.weight"),
                    weight(layer, "self_attention.linear_proj.weight"),
                    weight(layer, "mlp.linear_fc1.weight"), weight(layer, "mlp.linear_fc2.weight")},
        .qkv_bias = weight(layer, "self_attention.linear_qkv.bias"),
        .attention_norm = weight(layer, "self_attention.linear_qkv.layer_norm_weight"),
        .mlp_norm = weight(layer, "mlp.linear_fc1.layer_norm_weight"),
        .q_norm = weight(layer, "self_attention.q_layernorm.weight"),
        .k_norm = weight(layer, "self_attention.k_layernorm.weight"),
        .key_cache = key.mutable_data_ptr(),
        .value_cache = value.mutable_data_ptr()};
  }
  ResidualStream stream{.sum = at::empty_like(hidden), .pending = at::empty_like(hidden)};
  kernel.residual = stream.sum.mutable_data_ptr();
  kernel.pending = stream.pending.mutable_data_ptr();
  kernel.exchange = exchange_.mutable_data_ptr();
  if (const auto* const peers = tp_.peer_memory()) std::ranges::copy(peers->memory(), kernel.peers);
  check(launch::decode_row(kernel, models::stream()));
  stream.pending = tp_.all_reduce(stream.pending);
  return stream;
}

}  // namespace ferry::models
