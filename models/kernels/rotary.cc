#include "models/kernels/rotary.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "distckpt/base/error.h"
#include "models/kernels/rotary_cuda.h"
#include "models/kernels/whole_vectors.h"
#include "models/spec/yarn.h"

namespace ferry::models {
namespace {

// base ** (0, 2, .. / dim), in fp32.
at::Tensor powers(double base, std::int64_t dim) {
  return at::pow(base, at::arange(0, dim, 2, at::kLong).to(at::kFloat) / static_cast<double>(dim));
}

at::Tensor llama3(const at::Tensor& inv_freq, const RopeScaling& scaling) {
  const double low = scaling.low_freq_factor.value_or(1.0);
  const double high = scaling.high_freq_factor.value_or(4.0);
  const auto old_length =
      static_cast<double>(scaling.original_max_position_embeddings.value_or(8192));
  const auto wavelength = at::reciprocal(inv_freq) * (2 * std::numbers::pi);
  const auto scaled = at::where(wavelength > old_length / low, inv_freq / scaling.factor, inv_freq);
  const auto smooth = (at::reciprocal(wavelength) * old_length - low) / (high - low);
  const auto between = (1 - smooth) * scaled / scaling.factor + smooth * scaled;
  const auto is_between = (wavelength < old_length / high).logical_not() *
                          (wavelength > old_length / low).logical_not();
  return at::where(is_between, between, scaled);
}

at::Tensor yarn(double base, std::int64_t dim, double factor, const RopeScaling& scaling) {
  const auto old_length =
      static_cast<double>(scaling.original_max_position_embeddings.value_or(4096));
  const auto size = static_cast<double>(dim);
  const auto correction = [&](double rotations) {
    return size * std::log(old_length / (rotations * 2 * std::numbers::pi)) / (2 * std::log(base));
  };
  double low = correction(scaling.beta_fast.value_or(32.0));
  double high = correction(scaling.beta_slow.value_or(1.0));
  if (scaling.truncate.value_or(true)) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, size - 1);
  if (low == high) high += 0.001;
  const auto ramp = at::clamp((at::arange(dim / 2, at::kFloat) - low) / (high - low), 0, 1);
  const auto extrapolated = 1 - ramp;
  const auto pos_freqs = powers(base, dim);
  return at::reciprocal(factor * pos_freqs) * (1 - extrapolated) +
         at::reciprocal(pos_freqs) * extrapolated;
}

// The factor of angles of sequences that may be `factor` times as long as the original ones.
double longrope_scaling(const RopeScaling& scaling) {
  if (scaling.attention_factor) return *scaling.attention_factor;
  const auto old_length =
      static_cast<double>(scaling.original_max_position_embeddings.value_or(4096));
  return scaling.factor <= 1 ? 1.0 : std::sqrt(1 + std::log(scaling.factor) / std::log(old_length));
}

class FusedRotary : public torch::autograd::Function<FusedRotary> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x,
                            const at::Tensor& cos,
                            const at::Tensor& sin,
                            bool interleaved) {
    context->save_for_backward({cos, sin});
    context->saved_data["interleaved"] = interleaved;
    return rotary_cuda(x, cos, sin, interleaved);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    auto grad_x = at::empty_like(grads[0], at::MemoryFormat::Contiguous);
    rotary_backward_cuda(grads[0], saved[0], saved[1], context->saved_data["interleaved"].toBool(),
                         grad_x);
    return {grad_x, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

RotaryStyle style_of(const TransformerConfig& config) {
  if (config.rotary_interleaved) return RotaryStyle::kNeighbours;
  if (!config.multi_latent_attention) return RotaryStyle::kHalves;
  return config.traits.rotary_in_fp32 ? RotaryStyle::kComplex : RotaryStyle::kInterleave;
}

// Frequencies of the three positions take turns (Qwen3-VL's mrope_interleaved): every third one is
// the height's and every third the width's as far as their sections go, all others are time's.
at::Tensor axes_of(const std::vector<std::int64_t>& sections, std::int64_t num_frequencies) {
  auto axes = at::zeros({num_frequencies}, at::kLong);
  for (const std::int64_t axis : {1, 2}) {
    const auto end = 3 * sections[static_cast<std::size_t>(axis)];
    if (axis < std::min(end, num_frequencies)) axes.slice(0, axis, end, 3).fill_(axis);
  }
  return axes;
}

// `far` [tokens, 1, 1], bool: the tokens that turn by `longer`.
RotaryAngles choose(const at::Tensor& far, const RotaryAngles& longer, const RotaryAngles& others) {
  const auto chosen = [&](at::Tensor RotaryAngles::*part) {
    return (others.*part).defined() ? at::where(far, longer.*part, others.*part) : at::Tensor();
  };
  return {.style = others.style,
          .cos = chosen(&RotaryAngles::cos),
          .sin = chosen(&RotaryAngles::sin),
          .complex = chosen(&RotaryAngles::complex)};
}

at::Tensor rotate_half(const at::Tensor& x) {
  const auto halves = x.chunk(2, -1);
  return at::cat({-halves[1], halves[0]}, -1);
}

}  // namespace

// Computes the frequencies on the host, in transformers' order of operations.
RotaryEmbedding::RotaryEmbedding(const TransformerConfig& config, at::Device device)
    : style_(style_of(config)), in_fp32_(config.traits.rotary_in_fp32) {
  const auto dim = config.rotary_dim();
  const auto& scaling = config.rope_scaling;
  const auto plain = at::reciprocal(powers(config.rotary_base, dim));
  if (scaling.type == RopeType::kDefault) {
    inv_freq_ = plain;
  } else if (scaling.type == RopeType::kLinear) {
    inv_freq_ = plain / scaling.factor;
  } else if (scaling.type == RopeType::kLlama3) {
    inv_freq_ = llama3(plain, scaling);
  } else if (scaling.type == RopeType::kYarn) {
    inv_freq_ = yarn(config.rotary_base, dim, scaling.factor, scaling);
    const double all_dim = scaling.mscale_all_dim.value_or(0.0);
    const double mscale = scaling.mscale.value_or(0.0);
    attention_scaling_ = scaling.attention_factor      ? *scaling.attention_factor
                         : mscale != 0 && all_dim != 0 ? yarn_mscale(scaling.factor, mscale) /
                                                             yarn_mscale(scaling.factor, all_dim)
                                                       : yarn_mscale(scaling.factor, 1.0);
  } else if (scaling.type == RopeType::kLongrope) {
    const auto& divisors = scaling.short_factor;
    require(std::ssize(divisors) == dim / 2, ErrorKind::kLayout,
            "longrope has {} factors (short_factor, long_factor) for {} frequencies",
            divisors.size(), dim / 2);
    inv_freq_ = at::reciprocal(at::tensor(divisors, at::kDouble).to(at::kFloat) *
                               powers(config.rotary_base, dim));
    attention_scaling_ = longrope_scaling(scaling);
  } else {
    throw Error(
        ErrorKind::kLayout,
        fmt::format("RoPE scaling \"{}\" is not known to the models", name_of(scaling.type)),
        "known are linear, llama3, longrope and yarn");
  }
  inv_freq_ = inv_freq_.to(device);
  if (config.mrope_section.empty()) return;
  require(config.mrope_section.size() == 3, ErrorKind::kLayout,
          "mrope_section has {} sections: there are three, of time, height and width",
          config.mrope_section.size());
  axes_ = axes_of(config.mrope_section, dim / 2).to(device);
}

RotaryAngles RotaryEmbedding::angles(const at::Tensor& positions, at::ScalarType dtype) const {
  const bool fused =
      !in_fp32_ && (style_ == RotaryStyle::kHalves || style_ == RotaryStyle::kInterleave);
  if (positions.dim() == 1 && positions.is_cuda() && fused) {
    const auto both = rotary_angles_cuda(positions, inv_freq_, attention_scaling_, dtype);
    return {.style = style_, .cos = both[0], .sin = both[1]};
  }
  const auto of_frequencies =
      positions.dim() == 1 ? positions.unsqueeze(1) : positions.index_select(0, axes_).t();
  const auto angle = of_frequencies.to(at::kFloat) * inv_freq_;  // [tokens, dim/2]
  if (style_ == RotaryStyle::kComplex) {
    const auto turn = at::polar(at::ones_like(angle), angle) * attention_scaling_;
    return {.style = style_, .complex = turn.unsqueeze(1)};
  }
  const auto both = style_ == RotaryStyle::kNeighbours ? at::repeat_interleave(angle, 2, -1)
                                                       : at::cat({angle, angle}, -1);
  const auto kept = in_fp32_ ? at::kFloat : dtype;
  return {.style = style_,
          .cos = (both.cos() * attention_scaling_).to(kept).unsqueeze(1),
          .sin = (both.sin() * attention_scaling_).to(kept).unsqueeze(1)};
}

PositionEmbedding::PositionEmbedding(const TransformerConfig& config, at::Device device)
    : rotary_(config, device),
      scaling_beta_(config.rope_scaling.llama_4_scaling_beta.value_or(0)),
      scaling_length_(config.rope_scaling.original_max_position_embeddings.value_or(
          config.max_position_embeddings)) {
  if (config.rope_scaling.type == RopeType::kLongrope) {
    auto longer = config;
    longer.rope_scaling.short_factor = config.rope_scaling.long_factor;
    longer_.emplace(longer, device);
  }
  if (!config.has_local_rotary()) return;
  auto local = config;
  local.rotary_base = config.rotary_base_local.value_or(config.rotary_base);
  local.rope_scaling = {};
  local_.emplace(local, device);
}

// get_llama_4_attn_scale of modeling_ministral3.py.
PositionAngles PositionEmbedding::angles(const at::Tensor& positions,
                                         at::ScalarType dtype,
                                         const at::Tensor& lengths) const {
  at::Tensor scale;
  if (scaling_beta_ != 0) {
    const auto far = models::log(1 + at::floor(positions / scaling_length_));
    scale = (1 + scaling_beta_ * far).to(dtype).view({-1, 1, 1});
  }
  auto angles = rotary_.angles(positions, dtype);
  if (longer_ && lengths.defined()) {
    const auto far = lengths.gt(scaling_length_).view({-1, 1, 1});
    angles = choose(far, longer_->angles(positions, dtype), angles);
  }
  return {.angles = std::move(angles),
          .local = local_ ? local_->angles(positions, dtype) : RotaryAngles{},
          .query_scale = scale};
}

at::Tensor apply_rotary(const at::Tensor& x, const RotaryAngles& angles) {
  const auto dim =
      angles.style == RotaryStyle::kComplex ? 2 * angles.complex.size(-1) : angles.cos.size(-1);
  if (const auto rest = x.size(-1) - dim; rest > 0)
    return at::cat({apply_rotary(x.narrow(-1, 0, dim), angles), x.narrow(-1, dim, rest)}, -1);
  if (x.is_cuda() && angles.are_of(x.scalar_type()) &&
      (angles.style == RotaryStyle::kHalves || angles.style == RotaryStyle::kInterleave)) {
    return FusedRotary::apply(x.contiguous(), angles.cos, angles.sin,
                              angles.style == RotaryStyle::kInterleave);
  }
  switch (angles.style) {
    case RotaryStyle::kHalves:
      return (x * angles.cos + rotate_half(x) * angles.sin).to(x.scalar_type());
    case RotaryStyle::kInterleave: {
      const auto half = x.size(-1) / 2;
      const auto cos = angles.cos.narrow(-1, 0, half);
      const auto sin = angles.sin.narrow(-1, 0, half);
      const auto even = x.slice(-1, 0, std::nullopt, 2);
      const auto odd = x.slice(-1, 1, std::nullopt, 2);
      return at::cat({even * cos - odd * sin, odd * cos + even * sin}, -1);
    }
    case RotaryStyle::kNeighbours: {
      const auto even = x.slice(-1, 0, std::nullopt, 2);
      const auto odd = x.slice(-1, 1, std::nullopt, 2);
      const auto across = at::stack({-odd, even}, -1).flatten(-2);
      const auto kept = angles.cos.scalar_type();
      return (x.to(kept) * angles.cos + across.to(kept) * angles.sin).to(x.scalar_type());
    }
    case RotaryStyle::kComplex: {
      auto shape = x.sizes().vec();
      shape.back() /= 2;
      shape.push_back(2);
      const auto pairs = at::view_as_complex(x.to(at::kFloat).reshape(shape).contiguous());
      return at::view_as_real(pairs * angles.complex).flatten(2).to(x.scalar_type());
    }
  }
  return x;
}

double softmax_scale(const TransformerConfig& config) {
  if (config.softmax_scale) return *config.softmax_scale;
  if (!config.multi_latent_attention)
    return std::pow(static_cast<double>(config.kv_channels), -0.5);
  const double scale =
      std::pow(static_cast<double>(config.qk_head_dim + config.qk_pos_emb_head_dim), -0.5);
  const double all_dim = config.rope_scaling.mscale_all_dim.value_or(0.0);
  if (config.rope_scaling.type == RopeType::kDefault || all_dim == 0) return scale;
  const double mscale = yarn_mscale(config.rope_scaling.factor, all_dim);
  return scale * mscale * mscale;
}

}  // namespace ferry::models
