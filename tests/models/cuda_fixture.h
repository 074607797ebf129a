// Random tensors on a GPU, where there is one, and their bytes.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>

namespace ferry::models {

class CudaKernels : public testing::Test {
 protected:
  void SetUp() override {
    if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
    at::manual_seed(1);
  }
  static at::Tensor random(at::IntArrayRef shape, at::ScalarType dtype = at::kBFloat16) {
    return at::randn(shape, at::TensorOptions().device(at::kCUDA)).to(dtype);
  }
};

inline at::Tensor bytes(const at::Tensor& x) {
  return x.contiguous().view(at::kByte);
}

inline testing::AssertionResult same_bytes(const at::Tensor& got, const at::Tensor& expected) {
  if (got.sizes() != expected.sizes() || got.scalar_type() != expected.scalar_type())
    return testing::AssertionFailure() << "other shape or type";
  if (at::equal(bytes(got), bytes(expected))) return testing::AssertionSuccess();
  const auto differ = got.ne(expected);
  return testing::AssertionFailure()
         << differ.sum().item<std::int64_t>() << " of " << got.numel() << " differ, by at most "
         << (got - expected).abs().max().item<float>();
}

}  // namespace ferry::models
