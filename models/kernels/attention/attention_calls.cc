#include "models/kernels/attention/attention_calls.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "distckpt/base/error.h"
#include "models/kernels/attention/deterministic_algorithms.h"
#include "models/kernels/attention/eager_attention_cuda.h"

namespace ferry::models {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

void save(AutogradContext& context, const AttentionCall& call) {
  context.saved_data["scale"] = call.scale;
  context.saved_data["window"] = call.window.value_or(0);
  context.saved_data["deterministic"] = call.deterministic;
}

AttentionCall saved_call(AutogradContext& context) {
  const auto window = context.saved_data["window"].toInt();
  return {.scale = context.saved_data["scale"].toDouble(),
          .window = window == 0 ? std::nullopt : std::optional(window),
          .deterministic = context.saved_data["deterministic"].toBool()};
}

struct Sides {
  std::optional<c10::SymInt> left{};
  std::optional<c10::SymInt> right{};
};
Sides sides_of(const AttentionCall& call) {
  if (!call.window) return {};
  return {.left = c10::SymInt(*call.window - 1), .right = c10::SymInt(0)};
}

class Flash : public torch::autograd::Function<Flash> {
 public:
  static at::Tensor forward(AutogradContext* context,
                            const at::Tensor& query,
                            const at::Tensor& key,
                            const at::Tensor& value,
                            const RowsOfSequences& queries,
                            const RowsOfSequences& keys,
                            const AttentionCall& call) {
    const auto sides = sides_of(call);
    const auto [out, log_sum, rng, unused, mask] = at::_flash_attention_forward_symint(
        query, key, value, queries.begin, keys.begin, queries.longest, keys.longest,
        /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false, call.scale, sides.left,
        sides.right);
    context->save_for_backward(
        {query, key, value, out, log_sum, queries.begin, keys.begin, rng, unused});
    context->saved_data["longest_query"] = queries.longest;
    context->saved_data["longest_key"] = keys.longest;
    save(*context, call);
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto call = saved_call(*context);
    const auto sides = sides_of(call);
    const DeterministicAlgorithms deterministic(call.deterministic);
    const auto [of_query, of_key, of_value] = at::_flash_attention_backward_symint(
        grads[0].contiguous(), saved[0], saved[1], saved[2], saved[3], saved[4], saved[5], saved[6],
        context->saved_data["longest_query"].toInt(), context->saved_data["longest_key"].toInt(),
        /*dropout_p=*/0.0, /*is_causal=*/true, saved[7], saved[8], call.scale, sides.left,
        sides.right);
    return {of_query, of_key, of_value, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

struct WithLogSum {
  at::Tensor rows{};     // [queries, heads, dim]
  at::Tensor log_sum{};  // [heads, queries]
};

WithLogSum flash_beside_sinks(const at::Tensor& query,
                              const at::Tensor& key,
                              const at::Tensor& value,
                              const at::Tensor& sinks,
                              const RowsOfSequences& queries,
                              const RowsOfSequences& keys,
                              const AttentionCall& call) {
  const auto sides = sides_of(call);
  auto [rows, log_sum, rng, unused, mask] = at::_flash_attention_forward_symint(
      query, key, value, queries.begin, keys.begin, queries.longest, keys.longest,
      /*dropout_p=*/0.0, /*is_causal=*/true, /*return_debug_mask=*/false, call.scale, sides.left,
      sides.right);
  require(log_sum.dim() == 2, ErrorKind::kBug, "flash's sums of packed rows have {} dimensions",
          log_sum.dim());
  const auto all = at::logaddexp(log_sum, sinks.to(at::kFloat).unsqueeze(1));
  rows.mul_((log_sum - all).exp().transpose(0, 1).unsqueeze(2));
  return {.rows = rows, .log_sum = all};
}

class SinkAttention : public torch::autograd::Function<SinkAttention> {
 public:
  static at::Tensor forward(AutogradContext* context,
                            const at::Tensor& query,
                            const at::Tensor& key,
                            const at::Tensor& value,
                            const at::Tensor& sinks,
                            const RowsOfSequences& queries,
                            const RowsOfSequences& keys,
                            const AttentionCall& call) {
    WithLogSum result;
    if (call.alignment == Alignment::kBitwise) {
      const auto eager = eager_attention_cuda(query, key, value, sinks, queries, keys, call);
      result = {.rows = eager.rows, .log_sum = eager.log_sum};
    } else {
      result = flash_beside_sinks(query, key, value, sinks, queries, keys, call);
    }
    context->save_for_backward(
        {query, key, value, sinks, result.rows, result.log_sum, queries.begin, keys.begin});
    context->saved_data["longest_query"] = queries.longest;
    context->saved_data["longest_key"] = keys.longest;
    save(*context, call);
    return result.rows;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto& sinks = saved[3];
    const auto& rows = saved[4];
    const auto& log_sum = saved[5];
    const auto call = saved_call(*context);
    const auto sides = sides_of(call);
    const auto of_rows = grads[0].contiguous();
    const auto unused = at::empty({2}, rows.options().dtype(at::kLong));  // of dropout
    const DeterministicAlgorithms deterministic(call.deterministic);
    const auto [of_query, of_key, of_value] = at::_flash_attention_backward_symint(
        of_rows, saved[0], saved[1], saved[2], rows, log_sum, saved[6], saved[7],
        context->saved_data["longest_query"].toInt(), context->saved_data["longest_key"].toInt(),
        /*dropout_p=*/0.0, /*is_causal=*/true, unused, unused, call.scale, sides.left, sides.right);
    // The sink's weight times what its score would have changed in each row.
    const auto weights = (sinks.to(at::kFloat).unsqueeze(1) - log_sum).exp();
    const auto along = (of_rows.to(at::kFloat) * rows).sum(2).transpose(0, 1);
    const auto of_sinks = -(weights * along).sum(1).to(sinks.scalar_type());
    return {of_query, of_key, of_value, of_sinks, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// [sequences, heads, length, dim] -> [sequences, length, heads, `dim`], zeros behind.
at::Tensor for_flash(const at::Tensor& x, std::int64_t dim) {
  auto rows_first = x.transpose(1, 2);
  if (x.size(3) == dim) return rows_first;
  return at::constant_pad_nd(rows_first, {0, dim - x.size(3)});
}

class Cudnn : public torch::autograd::Function<Cudnn> {
 public:
  static at::Tensor forward(AutogradContext* context,
                            const at::Tensor& query,
                            const at::Tensor& key,
                            const at::Tensor& value,
                            const AttentionCall& call,
                            bool for_backward) {
    const auto result = at::_scaled_dot_product_cudnn_attention(
        query, key, value, std::nullopt, for_backward, /*dropout_p=*/0.0, /*is_causal=*/true,
        /*return_debug_mask=*/false, call.scale);
    const auto& out = std::get<0>(result);
    context->save_for_backward(
        {query, key, value, out, std::get<1>(result), std::get<6>(result), std::get<7>(result)});
    save(*context, call);
    return out;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto call = saved_call(*context);
    const auto& query = saved[0];
    const auto length = query.size(2);
    const auto keys = saved[1].size(2);
    if (!call.deterministic) {
      const auto [of_query, of_key, of_value] = at::_scaled_dot_product_cudnn_attention_backward(
          grads[0], query, saved[1], saved[2], saved[3], saved[4], saved[5], saved[6], {}, {}, {},
          length, keys, /*dropout_p=*/0.0, /*is_causal=*/true, call.scale);
      return {of_query, of_key, of_value, at::Tensor(), at::Tensor()};
    }
    const auto dim = query.size(3);
    const auto unused = at::empty({2}, query.options().dtype(at::kLong));  // of dropout
    const DeterministicAlgorithms deterministic(true);
    const auto [of_query, of_key, of_value] = at::_flash_attention_backward(
        for_flash(grads[0], dim).contiguous(), for_flash(query, dim), for_flash(saved[1], dim),
        for_flash(saved[2], dim), for_flash(saved[3], dim).contiguous(),
        saved[4].squeeze(-1).contiguous(), {}, {}, length, keys, /*dropout_p=*/0.0,
        /*is_causal=*/true, unused, unused, call.scale);
    return {of_query.transpose(1, 2), of_key.transpose(1, 2),
            of_value.narrow(3, 0, saved[2].size(3)).transpose(1, 2), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor flash_attention(const at::Tensor& query,
                           const at::Tensor& key,
                           const at::Tensor& value,
                           const RowsOfSequences& queries,
                           const RowsOfSequences& keys,
                           const AttentionCall& call) {
  return Flash::apply(query, key, value, queries, keys, call);
}

at::Tensor sink_attention(const at::Tensor& query,
                          const at::Tensor& key,
                          const at::Tensor& value,
                          const at::Tensor& sinks,
                          const RowsOfSequences& queries,
                          const RowsOfSequences& keys,
                          const AttentionCall& call) {
  return SinkAttention::apply(query, key, value, sinks, queries, keys, call);
}

at::Tensor cudnn_attention(const at::Tensor& query,
                           const at::Tensor& key,
                           const at::Tensor& value,
                           const AttentionCall& call) {
  const bool for_backward = at::GradMode::is_enabled() &&
                            (query.requires_grad() || key.requires_grad() || value.requires_grad());
  return Cudnn::apply(query, key, value, call, for_backward);
}

}  // namespace ferry::models
