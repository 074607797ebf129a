// Attention on the host by its eager formula, in dtypes that kBitwise does not have.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <optional>

#include "models/kernels/attention/attention.h"

namespace ferry::models {
namespace host_attention_test {

// The mask once had bf16's least value, which no fp16 can hold.
TEST(HostAttention, InHalfIsNearThatInFloat) {
  at::manual_seed(1);
  const auto query = at::randn({7, 4, 16}).to(at::kHalf);
  const auto key = at::randn({7, 2, 16}).to(at::kHalf);
  const auto value = at::randn({7, 2, 16}).to(at::kHalf);
  for (const auto window : {std::optional<std::int64_t>(), std::optional<std::int64_t>(3)}) {
    const auto run = [&](at::ScalarType dtype) {
      return attention(query.to(dtype), key.to(dtype), value.to(dtype), {{0, 7, 0, 7}},
                       {.scale = 0.25, .window = window})
          .to(at::kFloat);
    };
    EXPECT_LT((run(at::kHalf) - run(at::kFloat)).abs().max().item<float>(), 1e-2);
  }
}

}  // namespace host_attention_test
}  // namespace ferry::models
