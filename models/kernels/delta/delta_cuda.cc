#include "models/kernels/delta/delta_cuda.h"

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "models/kernels/cuda/cuda_call.h"
#include "models/kernels/delta/delta_launch.h"
#include "models/spec/transformer_config.h"

namespace ferry::models {
namespace {

at::Tensor contiguous_bf16(const at::Tensor& x) {
  return x.to(at::kBFloat16).contiguous();
}

struct WalkedChunks {
  at::Tensor y{};       // like a
  at::Tensor states{};  // [heads, chunks, key_dim, value_dim]: before each chunk
};

// launch::DeltaChunks by tensors; `r` may be undefined.
WalkedChunks walk_chunks(const at::Tensor& a,
                         const at::Tensor& b,
                         const at::Tensor& c,
                         const at::Tensor& decay,
                         const at::Tensor& r,
                         const at::Tensor& begins,
                         bool backwards) {
  const c10::cuda::CUDAGuard device(a.device());
  const auto heads = a.size(0);
  const auto chunks = a.size(1);
  const auto sequences = begins.size(0) - 1;
  const auto keys = b.size(3);
  const auto values = a.size(3);
  WalkedChunks walked{.y = at::empty_like(a),
                      .states = at::empty({heads, chunks, keys, values}, a.options())};
  check(launch::delta_chunks({.a = a.const_data_ptr(),
                              .b = b.const_data_ptr(),
                              .c = c.const_data_ptr(),
                              .decay = decay.const_data_ptr<float>(),
                              .r = r.defined() ? r.const_data_ptr() : nullptr,
                              .begins = begins.const_data_ptr<std::int32_t>(),
                              .y = walked.y.mutable_data_ptr(),
                              .states = walked.states.mutable_data_ptr(),
                              .sequences = static_cast<int>(sequences),
                              .heads = static_cast<int>(heads),
                              .chunks = static_cast<int>(chunks),
                              .values = static_cast<int>(values),
                              .backwards = backwards},
                             stream()));
  return walked;
}

// The states before each chunk, and what each token adds to them. Forwards the walk is
//   added = new_values - reading_keys S;  S = decay S + key^T added,
// and backwards the gradient G of S takes the same form, with keys in each other's place:
//   of_added += key G;  G = decay G + of_S - reading_keys^T of_added.
class DeltaStates : public torch::autograd::Function<DeltaStates> {
 public:
  // Returns states and added.
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context,
                                                const at::Tensor& new_values,
                                                const at::Tensor& reading_keys,
                                                const at::Tensor& key,
                                                const at::Tensor& decay,
                                                const at::Tensor& begins) {
    const auto minus = reading_keys.neg();
    const auto walked = walk_chunks(new_values, minus, key, decay, {}, begins, /*backwards=*/false);
    context->save_for_backward({minus, key, decay, begins, walked.states, walked.y});
    return {walked.states, walked.y};
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto& [minus, key, decay, begins, states, added] =
        std::tie(saved[0], saved[1], saved[2], saved[3], saved[4], saved[5]);
    const auto walked = walk_chunks(contiguous_bf16(grads[1]), key, minus, decay,
                                    contiguous_bf16(grads[0]), begins, /*backwards=*/true);
    const auto of_decay = (states * walked.states).sum({2, 3}, /*keepdim=*/false, at::kFloat);
    return {walked.y, at::matmul(walked.y, states.transpose(2, 3)).neg_(),
            at::matmul(added, walked.states.transpose(2, 3)), of_decay, at::Tensor()};
  }
};

// Owns what a launch reads.
struct CoreOnDevice {
  CoreOnDevice(const DeltaCore& core, const at::Tensor& output)
      : mixed(core.mixed.contiguous()),
        conv_weight(core.conv_weight.contiguous()),
        alpha(core.alpha.contiguous()),
        beta(core.beta.contiguous()),
        gate(core.gate.contiguous()),
        a_log(in_fp32(core.a_log)),
        dt_bias(in_fp32(core.dt_bias)),
        norm(in_fp32(core.norm)),
        convolved(at::empty_like(mixed)) {
    const auto heads = core.alpha.size(1);
    const auto value_dim = core.norm.size(0);
    const auto key_dim =
        (mixed.size(1) - heads * value_dim) / (2 * std::max<std::int64_t>(1, core.key_heads));
    const auto taps = core.conv_weight.size(2);
    require(delta_cuda_supports(mixed, key_dim, value_dim) &&
                delta_cuda_supports(key_dim, value_dim, taps) && output.is_contiguous() &&
                heads % core.key_heads == 0,
            ErrorKind::kBug, "tokens of the delta rule in a form that its kernels do not know");
    tokens = {.mixed = mixed.const_data_ptr(),
              .conv_weight = conv_weight.const_data_ptr(),
              .convolved = convolved.mutable_data_ptr(),
              .alpha = alpha.const_data_ptr(),
              .beta = beta.const_data_ptr(),
              .a_log = a_log.const_data_ptr<float>(),
              .dt_bias = dt_bias.const_data_ptr<float>(),
              .gate = gate.const_data_ptr(),
              .norm = norm.const_data_ptr<float>(),
              .output = output.mutable_data_ptr(),
              .key_heads = static_cast<int>(core.key_heads),
              .heads = static_cast<int>(heads),
              .taps = static_cast<int>(taps),
              .epsilon = static_cast<float>(core.epsilon)};
  }

  at::Tensor mixed, conv_weight, alpha, beta, gate, a_log, dt_bias, norm, convolved;
  launch::DeltaTokens tokens;

 private:
  static at::Tensor in_fp32(const at::Tensor& x) { return x.to(at::kFloat).contiguous(); }
};

// x [1, tokens, ..], each sequence followed by zeros up to a whole chunk.
at::Tensor in_whole_chunks(const at::Tensor& x, std::span<const std::int64_t> lengths) {
  if (std::ranges::all_of(lengths, [](auto length) { return length % kDeltaChunk == 0; })) return x;
  std::vector<at::Tensor> parts;
  std::int64_t begin = 0;
  for (const auto length : lengths) {
    parts.push_back(x.narrow(1, begin, length));
    auto sizes = x.sizes().vec();
    sizes[1] = distckpt::round_up(length, kDeltaChunk) - length;
    parts.push_back(at::zeros(sizes, x.options()));
    begin += length;
  }
  return at::cat(parts, 1);
}

}  // namespace

bool delta_cuda_supports(const at::Tensor& rows, std::int64_t key_dim, std::int64_t value_dim) {
  return rows.is_cuda() && rows.scalar_type() == at::kBFloat16 && key_dim == launch::kDeltaDim &&
         value_dim == launch::kDeltaDim;
}

bool delta_cuda_supports(std::int64_t key_dim, std::int64_t value_dim, std::int64_t taps) {
  return key_dim == launch::kDeltaDim && value_dim == launch::kDeltaDim && taps > 1 &&
         taps <= launch::kMostTaps;
}

void delta_step_cuda(const DeltaCore& core,
                     const at::Tensor& rows,
                     const at::Tensor& slots,
                     const at::Tensor& conv,
                     const at::Tensor& recurrent,
                     const at::Tensor& output) {
  const c10::cuda::CUDAGuard device(core.mixed.device());
  CoreOnDevice on(core, output);
  require(conv.is_contiguous() && recurrent.is_contiguous(), ErrorKind::kBug,
          "states of the delta rule with strides");
  on.tokens.rows = rows.const_data_ptr<std::int64_t>();
  on.tokens.slots = slots.const_data_ptr<std::int64_t>();
  on.tokens.states = recurrent.mutable_data_ptr<float>();
  on.tokens.sequences = static_cast<int>(rows.size(0));
  check(launch::delta_step(on.tokens, conv.mutable_data_ptr(), stream()));
}

void delta_walk_cuda(const DeltaCore& core,
                     std::span<const DeltaSpan> spans,
                     const at::Tensor& before,
                     const at::Tensor& recurrent,
                     const at::Tensor& output) {
  const c10::cuda::CUDAGuard device(core.mixed.device());
  CoreOnDevice on(core, output);
  const auto count = static_cast<std::int64_t>(spans.size());
  std::vector<std::int64_t> numbers(3 * spans.size());
  std::int64_t most = 0;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    numbers[i] = spans[i].row_begin;
    numbers[spans.size() + i] = spans[i].num_rows;
    numbers[2 * spans.size() + i] = spans[i].slot;
    most = std::max(most, spans[i].num_rows);
  }
  const auto sent =
      at::tensor(numbers, at::kLong).pin_memory().to(core.mixed.device(), /*non_blocking=*/true);
  on.tokens.rows = sent.const_data_ptr<std::int64_t>();
  on.tokens.slots = on.tokens.rows + 2 * count;
  on.tokens.sequences = static_cast<int>(count);
  if (recurrent.defined()) {
    require(recurrent.is_contiguous(), ErrorKind::kBug, "states of the delta rule with strides");
    on.tokens.states = recurrent.mutable_data_ptr<float>();
  }
  const auto numbers_of_rows = [&](std::int64_t each) {
    return at::empty({on.mixed.size(0), each}, on.mixed.options().dtype(at::kFloat));
  };
  const auto factors = numbers_of_rows(2 * core.key_heads);
  const auto decays_and_betas = numbers_of_rows(2 * core.alpha.size(1));
  at::Tensor convolution;
  if (before.defined()) convolution = before.contiguous();
  check(
      launch::delta_walk({.tokens = on.tokens,
                          .counts = on.tokens.rows + count,
                          .most = most,
                          .before = convolution.defined() ? convolution.const_data_ptr() : nullptr,
                          .factors = factors.mutable_data_ptr<float>(),
                          .decays_and_betas = decays_and_betas.mutable_data_ptr<float>()},
                         stream()));
}

at::Tensor packed_gated_delta_rule(const DeltaRows& rows, std::span<const std::int64_t> lengths) {
  const auto padded = [&](const at::Tensor& x) { return in_whole_chunks(x, lengths); };
  const auto parts = delta_in_chunks({.query = padded(rows.query),
                                      .key = padded(rows.key),
                                      .value = padded(rows.value),
                                      .decay = padded(rows.decay),
                                      .beta = padded(rows.beta)},
                                     Alignment::kFast);
  std::vector<std::int32_t> begins{0};
  for (const auto length : lengths)
    begins.push_back(begins.back() +
                     static_cast<std::int32_t>(distckpt::ceil_div(length, kDeltaChunk)));
  const auto ends =
      at::tensor(begins, at::kInt).pin_memory().to(rows.key.device(), /*non_blocking=*/true);
  const auto flat = [](const at::Tensor& x) { return contiguous_bf16(x.squeeze(0)); };
  const auto walked =
      DeltaStates::apply(flat(parts.new_values), flat(parts.reading_keys), flat(parts.key),
                         parts.of_chunk.squeeze(0).contiguous(), ends);
  const auto& [states, added] = std::tie(walked[0], walked[1]);
  const auto by_head =
      at::matmul(flat(parts.query), states) + at::matmul(flat(parts.within), added);
  const auto all = by_head.flatten(1, 2).transpose(0, 1);  // [tokens, heads, value_dim]
  std::vector<at::Tensor> outputs;
  for (std::size_t i = 0; i < lengths.size(); ++i)
    outputs.push_back(all.narrow(0, begins[i] * kDeltaChunk, lengths[i]));
  return at::cat(outputs).unsqueeze(0);
}

}  // namespace ferry::models
