#include "models/kernels/delta/delta_rule.h"

#include <ATen/ATen.h>

#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "distckpt/base/integers.h"
#include "models/kernels/product/float_product.h"
#include "models/kernels/product/unit_triangular.h"
#include "models/kernels/whole_vectors.h"
#include "models/spec/transformer_config.h"

namespace ferry::models {
namespace {

constexpr double kNormEpsilon = 1e-6;

at::Tensor l2norm(const at::Tensor& x) {
  return x * at::rsqrt((x * x).sum(-1, /*keepdim=*/true) + kNormEpsilon);
}

// Rows of every value head, in fp32.
struct DeltaHeads {
  at::Tensor query, key, value;  // [sequences, heads, tokens, dim]
  at::Tensor decay, beta;        // [sequences, heads, tokens]
};

DeltaHeads heads_first(const DeltaRows& rows) {
  const auto first = [](const at::Tensor& x) {
    return x.transpose(1, 2).to(at::kFloat).contiguous();
  };
  const auto each = rows.value.size(2) / rows.key.size(2);
  const auto of_value_heads = [&](const at::Tensor& x) {
    return each == 1 ? x : x.repeat_interleave(each, 2);
  };
  return {.query = l2norm(first(of_value_heads(rows.query))),
          .key = l2norm(first(of_value_heads(rows.key))),
          .value = first(rows.value),
          .decay = first(rows.decay),
          .beta = first(rows.beta)};
}

at::Tensor initial_state(const at::Tensor& key, const at::Tensor& value, const at::Tensor& state) {
  if (state.defined()) return state;
  return at::zeros({key.size(0), key.size(1), key.size(-1), value.size(-1)}, key.options());
}

// x [sequences, channels, tokens], weight [channels, 1, kernel].
at::Tensor convolve_and_activate(const at::Tensor& x, const at::Tensor& weight) {
  const std::array<std::int64_t, 1> one{1};
  const std::array<std::int64_t, 1> none{0};
  const at::IntArrayRef padding(none);
  return models::silu(at::conv1d(x, weight, {}, /*stride=*/one, padding, /*dilation=*/one,
                                 /*groups=*/weight.size(0)));
}

}  // namespace

DeltaInChunks delta_in_chunks(const DeltaRows& rows, Alignment alignment) {
  auto heads = heads_first(rows);
  const auto multiply = [alignment](const at::Tensor& a, const at::Tensor& b) {
    return models::matmul(a, b, alignment);
  };
  heads.query = heads.query * std::pow(static_cast<double>(heads.query.size(-1)), -0.5);

  const auto tokens = heads.key.size(2);
  const auto num_chunks = distckpt::ceil_div(tokens, kDeltaChunk);
  const auto padding = num_chunks * kDeltaChunk - tokens;
  // -> [sequences, heads, chunks, kDeltaChunk, ..]
  const auto in_chunks = [&](const at::Tensor& x) {
    const auto padded = padding == 0   ? x
                        : x.dim() == 4 ? at::constant_pad_nd(x, {0, 0, 0, padding})
                                       : at::constant_pad_nd(x, {0, padding});
    return padded.unflatten(2, {num_chunks, kDeltaChunk});
  };
  const auto query = in_chunks(heads.query);
  const auto key = in_chunks(heads.key);
  const auto beta = in_chunks(heads.beta).unsqueeze(-1);
  const auto value_beta = in_chunks(heads.value) * beta;
  const auto key_beta = key * beta;
  const auto decay = in_chunks(heads.decay).cumsum(3);  // since the chunk's begin

  // Decays between any two tokens, and the system that condenses the chunk's replacements, whose
  // solutions are the new values and the keys that read the old state.
  const auto behind =
      at::ones({kDeltaChunk, kDeltaChunk}, query.options().dtype(at::kBool)).triu(1);
  const auto between = (decay.unsqueeze(4) - decay.unsqueeze(3))
                           .masked_fill(behind, -std::numeric_limits<double>::infinity())
                           .exp();
  const auto system = multiply(key_beta, key.transpose(-1, -2)) * between;
  const auto within = multiply(query, key.transpose(-1, -2)) * between;
  const auto since_begin = decay.exp().unsqueeze(-1);
  const auto new_values = solve_unit_triangular(system, value_beta, alignment);
  const auto reading_keys = solve_unit_triangular(system, key_beta * since_begin, alignment);
  return {.query = query * since_begin,
          .key = key * (decay.narrow(3, kDeltaChunk - 1, 1) - decay).exp().unsqueeze(-1),
          .reading_keys = reading_keys,
          .new_values = new_values,
          .within = within,
          .of_chunk = decay.select(3, kDeltaChunk - 1).exp()};
}

DeltaResult chunk_gated_delta_rule(const DeltaRows& rows,
                                   const at::Tensor& state,
                                   Alignment alignment) {
  const auto multiply = [alignment](const at::Tensor& a, const at::Tensor& b) {
    return models::matmul(a, b, alignment);
  };
  const auto parts = delta_in_chunks(rows, alignment);
  const auto tokens = rows.key.size(1);
  DeltaResult result{.state = initial_state(parts.key, parts.new_values, state)};
  result.state_of_chunks = result.state;
  // unbind() has the gradients of all parts in one tensor: those of select() have a tensor of
  // all chunks each.
  const auto chunks_of = [](const at::Tensor& x) { return x.unbind(2); };
  const auto query = chunks_of(parts.query);
  const auto key = chunks_of(parts.key);
  const auto reading_keys = chunks_of(parts.reading_keys);
  const auto new_values = chunks_of(parts.new_values);
  const auto within = chunks_of(parts.within);
  const auto of_chunk = chunks_of(parts.of_chunk.unsqueeze(-1).unsqueeze(-1));
  std::vector<at::Tensor> outputs;
  for (std::size_t i = 0; i < query.size(); ++i) {
    const auto added = new_values[i] - multiply(reading_keys[i], result.state);
    outputs.push_back(multiply(query[i], result.state) + multiply(within[i], added));
    result.state = result.state * of_chunk[i] + multiply(key[i].transpose(-1, -2), added);
    if (static_cast<std::int64_t>(i + 1) * kDeltaChunk <= tokens)
      result.state_of_chunks = result.state;
  }
  result.output = at::cat(outputs, 2)
                      .narrow(2, 0, tokens)
                      .transpose(1, 2)
                      .to(rows.query.scalar_type())
                      .contiguous();
  return result;
}

DeltaResult recurrent_gated_delta_rule(const DeltaRows& rows, const at::Tensor& state) {
  const auto heads = heads_first(rows);
  const auto query = heads.query / std::pow(static_cast<double>(heads.query.size(-1)), 0.5);
  DeltaResult result{.state = initial_state(heads.key, heads.value, state)};
  std::vector<at::Tensor> outputs;
  for (std::int64_t i = 0; i < heads.key.size(2); ++i) {
    const auto token = [i](const at::Tensor& x) { return x.select(2, i).unsqueeze(-1); };
    const auto key = token(heads.key);
    const auto decayed = result.state * token(heads.decay).exp().unsqueeze(-1);
    const auto held = (decayed * key).sum(-2);
    const auto delta = (heads.value.select(2, i) - held) * token(heads.beta);
    result.state = decayed + key * delta.unsqueeze(-2);
    outputs.push_back((result.state * token(query)).sum(-2));
  }
  result.output = at::stack(outputs, 1).to(rows.query.scalar_type()).contiguous();
  return result;
}

at::Tensor causal_conv1d(const at::Tensor& x, const at::Tensor& before, const at::Tensor& weight) {
  const auto padding = weight.size(2) - 1;
  const auto all =
      before.defined() ? at::cat({before, x}) : at::constant_pad_nd(x, {0, 0, padding, 0});
  return convolve_and_activate(all.t().unsqueeze(0), weight).squeeze(0).t();
}

at::Tensor causal_conv1d_update(const at::Tensor& x,
                                const at::Tensor& before,
                                const at::Tensor& weight) {
  const auto all = at::cat({before, x.unsqueeze(1)}, 1).transpose(1, 2);
  return convolve_and_activate(all, weight).squeeze(2);
}

at::Tensor gated_rms_norm(const at::Tensor& x,
                          const at::Tensor& gate,
                          const at::Tensor& weight_less_one,
                          double epsilon) {
  const auto wide = x.to(at::kFloat);
  const auto variance = wide.pow(2).mean(-1, /*keepdim=*/true);
  const auto normed = (wide * at::rsqrt(variance + epsilon)).to(x.scalar_type());
  const auto weight = (weight_less_one + 1.0).to(x.scalar_type());
  return (weight * normed * models::silu(gate.to(at::kFloat))).to(x.scalar_type());
}

}  // namespace ferry::models
