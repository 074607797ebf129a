// Attention on the host by its eager formula.
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

// Ranks of tensor and context parallel groups hold some heads and some rows. Terms of scores cancel
// but for their roundings, made large, so that another order of a sum shows.
TEST(HostAttention, OfFewRowsAndHeadsHasTheBitsOfAll) {
  at::manual_seed(1);
  const AttentionOptions options{.scale = 1 << 20, .alignment = Alignment::kBitwise};
  for (int draw = 0; draw < 20; ++draw) {
    const auto half = at::randn({24, 8, 4}) * at::exp2(at::randint(-6, 7, {24, 8, 4}));
    const auto query = at::cat({half, half}, 2).to(at::kBFloat16);
    const auto key_half = at::randn({24, 2, 4});
    const auto key = at::cat({key_half, -key_half}, 2).to(at::kBFloat16);
    const auto value = at::randn({24, 2, 8}).to(at::kBFloat16);
    const auto all = attention(query, key, value, {{0, 24, 0, 24}}, options);
    for (const std::int64_t heads : {1, 2, 4}) {
      for (const std::int64_t first : {0, 6, 18}) {
        const auto part = [&](const at::Tensor& x) {
          return x.narrow(0, first, 6).narrow(1, 0, heads).contiguous();
        };
        const auto seen = [](const at::Tensor& x) { return x.narrow(1, 0, 1).contiguous(); };
        EXPECT_TRUE(at::equal(
            attention(part(query), seen(key), seen(value), {{0, 6, 0, first + 6}}, options),
            part(all)))
            << heads << " heads, rows from " << first << ", draw " << draw;
      }
    }
  }
}

}  // namespace host_attention_test
}  // namespace ferry::models
