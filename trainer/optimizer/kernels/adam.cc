#include "trainer/optimizer/kernels/adam.h"

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <type_traits>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "trainer/optimizer/kernels/adam_cuda.h"
#include "trainer/optimizer/kernels/adam_formula.h"

namespace ferry::trainer {
namespace {

constexpr std::int64_t kAdamBlock = 64;
constexpr std::int64_t kBlocksAtOnce = 512;   // of a thread
constexpr std::int64_t kSumAtOnce = 1 << 16;  // elements of one partial sum

AdamFactors factors_of(const AdamScalars& s) {
  const auto step = static_cast<double>(s.step);
  return {.grad_scale = static_cast<float>(s.grad_scale),
          .decay = s.decoupled_weight_decay ? static_cast<float>(1 - s.lr * s.weight_decay) : 1.0F,
          .l2 = s.decoupled_weight_decay ? 0.0F : static_cast<float>(s.weight_decay),
          .one_minus_beta1 = static_cast<float>(1 - s.beta1),
          .beta2 = static_cast<float>(s.beta2),
          .one_minus_beta2 = static_cast<float>(1 - s.beta2),
          .step_size = static_cast<float>(s.lr / (1 - std::pow(s.beta1, step))),
          .root_correction2 = static_cast<float>(std::sqrt(1 - std::pow(s.beta2, step))),
          .eps = static_cast<float>(s.eps)};
}

// A moment, fp32 or bf16: a block of it as fp32, and back.
class Moment {
 public:
  explicit Moment(const at::Tensor& moment)
      : data_(moment.mutable_data_ptr()), bf16_(moment.scalar_type() == at::kBFloat16) {}

  void load(std::int64_t at, float* __restrict__ block) const {
    by_type([&](auto* data) {
      for (std::int64_t i = 0; i < kAdamBlock; ++i) block[i] = static_cast<float>(data[at + i]);
    });
  }
  void store(const float* __restrict__ block, std::int64_t at) const {
    by_type([&](auto* data) {
      using T = std::remove_pointer_t<decltype(data)>;
      for (std::int64_t i = 0; i < kAdamBlock; ++i) data[at + i] = static_cast<T>(block[i]);
    });
  }

 private:
  template <typename Run>
  void by_type(const Run& run) const {
    if (bf16_)
      run(static_cast<at::BFloat16*>(data_));
    else
      run(static_cast<float*>(data_));
  }

  void* data_;
  bool bf16_;
};

// `param`: null where the masters are the parameters.
template <typename Grad, typename Param>
void update_block(const Grad* __restrict__ grad,
                  float* __restrict__ master,
                  float* __restrict__ exp_avg,
                  float* __restrict__ exp_avg_sq,
                  Param* __restrict__ param,
                  bool decays,
                  const AdamFactors& factors) {
  for (std::int64_t i = 0; i < kAdamBlock; ++i) {
    const auto now =
        adam_element({master[i], exp_avg[i], exp_avg_sq[i]}, static_cast<float>(grad[i]), decays,
                     factors, [](float x) { return std::sqrt(x); });
    master[i] = now.param;
    exp_avg[i] = now.exp_avg;
    exp_avg_sq[i] = now.exp_avg_sq;
  }
  if (param == nullptr) return;
  for (std::int64_t i = 0; i < kAdamBlock; ++i) param[i] = static_cast<Param>(master[i]);
}

template <typename Grad, typename Param>
void update(const AdamTensors& t, const AdamFactors& factors) {
  const auto* const grad = t.grad.const_data_ptr<Grad>();
  auto* const master = t.master.mutable_data_ptr<float>();
  const Moment exp_avg(t.exp_avg), exp_avg_sq(t.exp_avg_sq);
  auto* const param = t.param.defined() ? t.param.mutable_data_ptr<Param>() : nullptr;
  const auto* const decays = t.decays.const_data_ptr<std::uint8_t>();
  at::parallel_for(0, t.decays.numel(), kBlocksAtOnce, [&](std::int64_t begin, std::int64_t end) {
    std::array<float, kAdamBlock> first{}, second{};
    for (auto block = begin; block < end; ++block) {
      const auto at = block * kAdamBlock;
      exp_avg.load(at, first.data());
      exp_avg_sq.load(at, second.data());
      update_block(grad + at, master + at, first.data(), second.data(),
                   param == nullptr ? nullptr : param + at, decays[block] != 0, factors);
      exp_avg.store(first.data(), at);
      exp_avg_sq.store(second.data(), at);
    }
  });
}

// Calls `run` with a null pointer of the dtype.
template <typename Run>
void by_dtype(at::ScalarType dtype, const Run& run) {
  switch (dtype) {
    case at::kFloat:
      return run(static_cast<float*>(nullptr));
    case at::kBFloat16:
      return run(static_cast<at::BFloat16*>(nullptr));
    case at::kHalf:
      return run(static_cast<at::Half*>(nullptr));
    default:
      throw Error(ErrorKind::kBug, fmt::format("Adam does not run on {}", at::toString(dtype)));
  }
}

}  // namespace

void adam_update(const AdamTensors& t, const AdamScalars& scalars) {
  const auto elements = t.master.numel();
  for (const auto* tensor : {&t.grad, &t.master, &t.exp_avg, &t.exp_avg_sq, &t.param}) {
    require(!tensor->defined() || (tensor->numel() == elements && tensor->is_contiguous()),
            ErrorKind::kBug, "Adam takes contiguous tensors of one size");
  }
  require(t.decays.numel() * kAdamBlock == elements, ErrorKind::kBug,
          "Adam takes blocks of {} elements, got {} elements in {} blocks", kAdamBlock, elements,
          t.decays.numel());
  for (const auto* moment : {&t.exp_avg, &t.exp_avg_sq}) {
    require(moment->scalar_type() == at::kFloat || moment->scalar_type() == at::kBFloat16,
            ErrorKind::kBug, "moments are fp32 or bf16, not {}",
            at::toString(moment->scalar_type()));
  }
  if (elements == 0) return;
  const auto factors = factors_of(scalars);
  if (t.master.is_cuda()) return adam_update_cuda(t, factors);
  by_dtype(t.grad.scalar_type(), [&](auto* grad) {
    by_dtype(t.param.defined() ? t.param.scalar_type() : at::kFloat, [&](auto* param) {
      update<std::remove_pointer_t<decltype(grad)>, std::remove_pointer_t<decltype(param)>>(
          t, factors);
    });
  });
}

at::Tensor squared_sum(const at::Tensor& x) {
  require(x.is_contiguous(), ErrorKind::kBug, "a sum of squares takes a contiguous tensor");
  if (x.is_cuda()) return squared_sum_cuda(x);
  const auto elements = x.numel();
  std::vector<double> partial(static_cast<std::size_t>(distckpt::ceil_div(elements, kSumAtOnce)));
  by_dtype(x.scalar_type(), [&](auto* none) {
    using T = std::remove_pointer_t<decltype(none)>;
    const auto* const data = x.const_data_ptr<T>();
    at::parallel_for(0, static_cast<std::int64_t>(partial.size()), 1,
                     [&](std::int64_t begin, std::int64_t end) {
                       for (auto part = begin; part < end; ++part) {
                         std::array<double, 8> lanes{};
                         const auto add = [&](std::int64_t i, std::size_t lane) {
                           const auto value = static_cast<double>(static_cast<float>(data[i]));
                           lanes[lane] += value * value;
                         };
                         const auto stop = std::min(elements, (part + 1) * kSumAtOnce);
                         auto i = part * kSumAtOnce;
                         for (; i + 8 <= stop; i += 8) {
                           for (std::size_t lane = 0; lane < 8; ++lane)
                             add(i + static_cast<std::int64_t>(lane), lane);
                         }
                         for (std::size_t lane = 0; i < stop; ++i, ++lane) add(i, lane);
                         for (const auto lane : lanes)
                           partial[static_cast<std::size_t>(part)] += lane;
                       }
                     });
  });
  auto sum = at::zeros({1}, at::kDouble);
  for (const auto part : partial) *sum.mutable_data_ptr<double>() += part;
  return sum;
}

}  // namespace ferry::trainer
