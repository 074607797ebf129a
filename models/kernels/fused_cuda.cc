#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include <limits>

#include "distckpt/base/error.h"
#include "models/kernels/cuda/cuda_call.h"
#include "models/kernels/cuda/cuda_launch.h"
#include "models/kernels/log_probs_cuda.h"
#include "models/kernels/rms_norm_cuda.h"
#include "models/kernels/rotary_cuda.h"
#include "models/kernels/strided_copy_cuda.h"
#include "models/kernels/swiglu_cuda.h"

namespace ferry::models {
namespace {

launch::Element element_of(const at::Tensor& x) {
  require(x.is_cuda() && (x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat),
          ErrorKind::kBug, "this kernel takes bf16 or fp32 on a GPU");
  return x.scalar_type() == at::kFloat ? launch::Element::kFloat : launch::Element::kBf16;
}

launch::RmsNormShape norm_shape(const at::Tensor& x, double epsilon, NormRounding rounding) {
  const auto channels = x.size(-1);
  require(rms_norm_cuda_supports(channels), ErrorKind::kBug, "RMSNorm over {} channels", channels);
  return {.rows = x.numel() / channels,
          .channels = channels,
          .epsilon = static_cast<float>(epsilon),
          .rounds_once = rounding != NormRounding::kBeforeWeight,
          .adds_one = rounding == NormRounding::kOnceByOnePlus};
}

launch::RotaryShape rotary_shape(const at::Tensor& x, bool interleaved) {
  const bool grouped = x.dim() == 4;
  return {.tokens = x.size(0),
          .heads = grouped ? x.size(1) * x.size(2) : x.size(1),
          .heads_of_group = x.size(-2),
          .dim = x.size(-1),
          .token_stride = x.stride(0),
          .group_stride = grouped ? x.stride(1) : 0,
          .head_stride = x.stride(-2),
          .interleaved = interleaved};
}

launch::LogProbShape log_prob_shape(const at::Tensor& logits,
                                    VocabularyRange range,
                                    double temperature) {
  require(logits.is_contiguous(), ErrorKind::kBug, "logits have to be contiguous");
  return {.rows = logits.size(0),
          .columns = range.count,
          .row_stride = logits.size(1),
          .first = range.first,
          .inverse_temperature = 1.0F / static_cast<float>(temperature)};
}

}  // namespace

bool rms_norm_cuda_supports(std::int64_t channels) {
  return channels > 0 && (channels % 4 == 0 || channels < 128) && channels <= 65536;
}

RmsNormResult rms_norm_cuda(const at::Tensor& x,
                            const at::Tensor& delta,
                            const at::Tensor& weight,
                            double epsilon,
                            NormRounding rounding,
                            bool gathered) {
  const auto element = element_of(x);
  require(weight.scalar_type() == x.scalar_type() && weight.size(0) == x.size(-1), ErrorKind::kBug,
          "RMSNorm: weight of another type or size");
  require(
      !delta.defined() || (delta.sizes() == x.sizes() && delta.scalar_type() == x.scalar_type()),
      ErrorKind::kBug, "RMSNorm: a sum of unlike tensors");
  const c10::cuda::CUDAGuard device(x.device());
  auto shape = norm_shape(x, epsilon, rounding);
  shape.gathered_weight = gathered;
  const auto in = x.contiguous();
  const auto more = delta.defined() ? delta.contiguous() : delta;
  RmsNormResult result{.sum = delta.defined() ? at::empty_like(in) : in,
                       .y = at::empty_like(in),
                       .inverse_rms = at::empty({shape.rows}, x.options().dtype(at::kFloat))};
  if (shape.rows == 0) return result;
  check(launch::rms_norm(in.const_data_ptr(), more.defined() ? more.const_data_ptr() : nullptr,
                         weight.contiguous().const_data_ptr(),
                         more.defined() ? result.sum.mutable_data_ptr() : nullptr,
                         result.y.mutable_data_ptr(), result.inverse_rms.mutable_data_ptr<float>(),
                         shape, element, stream()));
  return result;
}

std::pair<at::Tensor, at::Tensor> rms_norm_backward_cuda(const at::Tensor& grad_y,
                                                         const at::Tensor& x,
                                                         const at::Tensor& weight,
                                                         const at::Tensor& inverse_rms,
                                                         const at::Tensor& grad_sum,
                                                         NormRounding rounding) {
  const auto element = element_of(x);
  const c10::cuda::CUDAGuard device(x.device());
  const auto shape = norm_shape(x, 0, rounding);
  const auto in = x.contiguous();
  const auto more = grad_sum.defined() ? grad_sum.contiguous() : grad_sum;
  auto grad_x = at::empty_like(in);
  auto partial = at::empty({launch::rms_norm_partials(shape.rows), shape.channels},
                           x.options().dtype(at::kFloat));
  if (shape.rows > 0)
    check(launch::rms_norm_backward(
        grad_y.contiguous().const_data_ptr(), in.const_data_ptr(),
        weight.contiguous().const_data_ptr(), inverse_rms.const_data_ptr<float>(),
        more.defined() ? more.const_data_ptr() : nullptr, grad_x.mutable_data_ptr(),
        partial.mutable_data_ptr<float>(), shape, element, stream()));
  return {grad_x, partial.sum(0).to(weight.scalar_type())};
}

namespace {

// `x` is only read unless `transpose`; `keys` may be undefined.
void turn(const at::Tensor& x,
          const at::Tensor& cos,
          const at::Tensor& sin,
          const at::Tensor& heads,
          const at::Tensor& keys,
          bool interleaved,
          bool transpose) {
  if (x.numel() == 0) return;
  const c10::cuda::CUDAGuard device(x.device());
  check(launch::rotary(const_cast<void*>(x.const_data_ptr()), cos.contiguous().const_data_ptr(),
                       sin.contiguous().const_data_ptr(), const_cast<void*>(heads.const_data_ptr()),
                       keys.defined() ? const_cast<void*>(keys.const_data_ptr()) : nullptr,
                       rotary_shape(x, interleaved), transpose, element_of(x), stream()));
}

}  // namespace

at::Tensor rotary_angles_cuda(const at::Tensor& positions,
                              const at::Tensor& inv_freq,
                              double scaling,
                              at::ScalarType dtype) {
  require(positions.dim() == 1 && positions.scalar_type() == at::kLong &&
              positions.device() == inv_freq.device() && inv_freq.scalar_type() == at::kFloat &&
              inv_freq.is_contiguous(),
          ErrorKind::kBug, "rotary: positions or frequencies of another type");
  const c10::cuda::CUDAGuard device(positions.device());
  const auto tokens = positions.size(0);
  const auto dim = 2 * inv_freq.size(0);
  auto both = at::empty({2, tokens, 1, dim}, inv_freq.options().dtype(dtype));
  if (tokens == 0) return both;
  check(launch::rotary_angles(positions.contiguous().const_data_ptr<std::int64_t>(),
                              inv_freq.const_data_ptr<float>(), both[0].mutable_data_ptr(),
                              both[1].mutable_data_ptr(), tokens, dim, static_cast<float>(scaling),
                              element_of(both), stream()));
  return both;
}

at::Tensor rotary_cuda(const at::Tensor& x,
                       const at::Tensor& cos,
                       const at::Tensor& sin,
                       bool interleaved) {
  const auto in = x.stride(-1) == 1 ? x : x.contiguous();
  const auto shape = rotary_shape(in, interleaved);
  auto y = at::empty({shape.tokens, shape.heads, shape.dim}, x.options());
  turn(in, cos, sin, y, {}, interleaved, /*transpose=*/false);
  return y;
}

void rotary_backward_cuda(const at::Tensor& grad_y,
                          const at::Tensor& cos,
                          const at::Tensor& sin,
                          bool interleaved,
                          at::Tensor& grad_x) {
  require(grad_x.stride(-1) == 1 && grad_x.scalar_type() == grad_y.scalar_type() &&
              grad_x.numel() == grad_y.numel(),
          ErrorKind::kBug, "rotary: the gradient is of another shape or type");
  turn(grad_x, cos, sin, grad_y.contiguous(), {}, interleaved, /*transpose=*/true);
}

QueryAndKey rotary_split_cuda(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  require(x.dim() == 4 && x.stride(-1) == 1, ErrorKind::kBug,
          "rotary: heads lie in groups, channel by channel");
  const auto queries = x.size(1) * (x.size(2) - 1);
  QueryAndKey apart{.query = at::empty({x.size(0), queries, x.size(3)}, x.options()),
                    .key = at::empty({x.size(0), x.size(1), x.size(3)}, x.options())};
  turn(x, cos, sin, apart.query, apart.key, /*interleaved=*/false, /*transpose=*/false);
  return apart;
}

bool norm_rotary_cuda_supports(const at::Tensor& x, const at::Tensor& cos) {
  const auto rows_are_aligned = [&](std::int64_t stride) { return stride % 8 == 0; };
  return x.is_cuda() && x.size(3) == launch::kNormedChannels && cos.size(-1) == x.size(3) &&
         x.stride(3) == 1 && rows_are_aligned(x.stride(0)) && rows_are_aligned(x.stride(1)) &&
         rows_are_aligned(x.stride(2)) && x.storage_offset() % 8 == 0;
}

QueryAndKey norm_rotary_cuda(const at::Tensor& x,
                             const HeadNorms& norms,
                             const at::Tensor& cos,
                             const at::Tensor& sin) {
  const c10::cuda::CUDAGuard device(x.device());
  const auto queries = x.size(1) * (x.size(2) - 1);
  QueryAndKey apart{.query = at::empty({x.size(0), queries, x.size(3)}, x.options()),
                    .key = at::empty({x.size(0), x.size(1), x.size(3)}, x.options())};
  if (x.numel() == 0) return apart;
  check(launch::norm_rotary(x.const_data_ptr(), norms.query.contiguous().const_data_ptr(),
                            norms.key.contiguous().const_data_ptr(),
                            cos.contiguous().const_data_ptr(), sin.contiguous().const_data_ptr(),
                            apart.query.mutable_data_ptr(), apart.key.mutable_data_ptr(),
                            rotary_shape(x, /*interleaved=*/false),
                            static_cast<float>(norms.epsilon), element_of(x), stream()));
  return apart;
}

void rotary_split_backward_cuda(const QueryAndKey& grads,
                                const at::Tensor& cos,
                                const at::Tensor& sin,
                                at::Tensor& grad_x) {
  require(grad_x.dim() == 4 && grad_x.stride(-1) == 1 &&
              grad_x.numel() == grads.query.numel() + grads.key.numel() &&
              grad_x.scalar_type() == grads.query.scalar_type(),
          ErrorKind::kBug, "rotary: the gradient is of another shape or type");
  turn(grad_x, cos, sin, grads.query.contiguous(), grads.key.contiguous(),
       /*interleaved=*/false, /*transpose=*/true);
}

at::Tensor swiglu_cuda(const at::Tensor& gate_up) {
  const auto element = element_of(gate_up);
  const c10::cuda::CUDAGuard device(gate_up.device());
  const auto ffn = gate_up.size(1) / 2;
  auto y = at::empty({gate_up.size(0), ffn}, gate_up.options());
  if (y.numel() == 0) return y;
  check(launch::swiglu(gate_up.contiguous().const_data_ptr(), y.mutable_data_ptr(), gate_up.size(0),
                       ffn, element, stream()));
  return y;
}

at::Tensor swiglu_backward_cuda(const at::Tensor& grad_y, const at::Tensor& gate_up) {
  const auto element = element_of(gate_up);
  const c10::cuda::CUDAGuard device(gate_up.device());
  const auto in = gate_up.contiguous();
  auto grad = at::empty_like(in);
  if (grad.numel() == 0) return grad;
  check(launch::swiglu_backward(grad_y.contiguous().const_data_ptr(), in.const_data_ptr(),
                                grad.mutable_data_ptr(), in.size(0), in.size(1) / 2, element,
                                stream()));
  return grad;
}

at::Tensor add_expert_biases_cuda(const at::Tensor& rows, const ExpertBiases& biases) {
  const auto element = element_of(rows);
  const c10::cuda::CUDAGuard device(rows.device());
  const auto in = rows.contiguous();
  const auto values = biases.values.contiguous();
  auto y = at::empty_like(in);
  if (y.numel() == 0) return y;
  check(launch::add_expert_biases(
      in.const_data_ptr(), values.const_data_ptr(), biases.ends.const_data_ptr<std::int32_t>(),
      y.mutable_data_ptr(), {.rows = in.size(0), .columns = in.size(1), .experts = values.size(0)},
      element, stream()));
  return y;
}

at::Tensor sum_expert_rows_cuda(const at::Tensor& rows, const at::Tensor& ends) {
  const auto element = element_of(rows);
  const c10::cuda::CUDAGuard device(rows.device());
  const auto in = rows.contiguous();
  auto sums = at::empty({ends.size(0), in.size(1)}, in.options());
  check(launch::sum_expert_rows(
      in.const_data_ptr(), ends.const_data_ptr<std::int32_t>(), sums.mutable_data_ptr(),
      {.rows = in.size(0), .columns = in.size(1), .experts = ends.size(0)}, element, stream()));
  return sums;
}

namespace {

float clamp_of(const QuickGeglu& options) {
  return options.clamp ? static_cast<float>(*options.clamp)
                       : std::numeric_limits<float>::infinity();
}

}  // namespace

at::Tensor quick_geglu_cuda(const at::Tensor& gate_up,
                            const ExpertBiases& biases,
                            const QuickGeglu& options) {
  const auto element = element_of(gate_up);
  const c10::cuda::CUDAGuard device(gate_up.device());
  const auto in = gate_up.contiguous();
  const auto values = biases.values.contiguous();
  const auto ffn = in.size(1) / 2;
  auto y = at::empty({in.size(0), ffn}, in.options());
  if (y.numel() == 0) return y;
  check(launch::quick_geglu(
      in.const_data_ptr(), values.const_data_ptr(), biases.ends.const_data_ptr<std::int32_t>(),
      y.mutable_data_ptr(), {.rows = in.size(0), .columns = ffn, .experts = values.size(0)},
      clamp_of(options), static_cast<float>(options.offset), element, stream()));
  return y;
}

at::Tensor quick_geglu_backward_cuda(const at::Tensor& grad_y,
                                     const at::Tensor& gate_up,
                                     const ExpertBiases& biases,
                                     const QuickGeglu& options) {
  const auto element = element_of(gate_up);
  const c10::cuda::CUDAGuard device(gate_up.device());
  const auto in = gate_up.contiguous();
  const auto of_y = grad_y.contiguous();
  const auto values = biases.values.contiguous();
  auto grad = at::empty_like(in);
  if (grad.numel() == 0) return grad;
  check(launch::quick_geglu_backward(
      of_y.const_data_ptr(), in.const_data_ptr(), values.const_data_ptr(),
      biases.ends.const_data_ptr<std::int32_t>(), grad.mutable_data_ptr(),
      {.rows = in.size(0), .columns = in.size(1) / 2, .experts = values.size(0)}, clamp_of(options),
      static_cast<float>(options.offset), element, stream()));
  return grad;
}

ScoredRows score_rows_cuda(const at::Tensor& logits,
                           const at::Tensor& labels,
                           VocabularyRange range,
                           double temperature) {
  const auto element = element_of(logits);
  const c10::cuda::CUDAGuard device(logits.device());
  ScoredRows scored{
      .statistics = at::empty({kRowStatistics, logits.size(0)}, logits.options().dtype(at::kFloat)),
      .log_probs = at::empty({logits.size(0)}, logits.options().dtype(at::kFloat))};
  check(launch::row_statistics(
      logits.const_data_ptr(), labels.contiguous().const_data_ptr<std::int64_t>(),
      scored.statistics.mutable_data_ptr<float>(), scored.log_probs.mutable_data_ptr<float>(),
      log_prob_shape(logits, range, temperature), element, stream()));
  return scored;
}

void logits_to_gradient_cuda(at::Tensor& logits,
                             const at::Tensor& statistics,
                             const at::Tensor& labels,
                             const at::Tensor& of_log_prob,
                             const at::Tensor& of_entropy,
                             VocabularyRange range,
                             double temperature) {
  const auto element = element_of(logits);
  const c10::cuda::CUDAGuard device(logits.device());
  const auto of_each_entropy = of_entropy.defined() ? of_entropy.contiguous() : of_entropy;
  check(launch::logits_to_gradient(
      logits.mutable_data_ptr(), statistics.contiguous().const_data_ptr<float>(),
      labels.contiguous().const_data_ptr<std::int64_t>(),
      of_log_prob.contiguous().const_data_ptr<float>(),
      of_entropy.defined() ? of_each_entropy.const_data_ptr<float>() : nullptr,
      log_prob_shape(logits, range, temperature), element, stream()));
}

void strided_copy_cuda(const at::Tensor& boxes,
                       const at::Tensor& box_of_tile,
                       const at::Tensor& memories,
                       std::byte* staging) {
  const c10::cuda::CUDAGuard guard(boxes.device());
  check(launch::strided_copy(static_cast<const StridedBox*>(boxes.const_data_ptr()),
                             box_of_tile.const_data_ptr<std::int32_t>(),
                             memories.const_data_ptr<std::int64_t>(), staging, box_of_tile.numel(),
                             stream()));
}

}  // namespace ferry::models
