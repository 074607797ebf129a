// A step's numbers on their way to the device and back; on a GPU, tokens that are still being
// drawn.
#include "rollout/step_inputs.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "rollout/kernels/step_copies.h"

namespace ferry::rollout {
namespace step_inputs_test {

struct Numbers {
  StepInputs::Array tokens, lengths, tables, bytes;
};

Numbers lay_out(StepInputs& inputs, std::int64_t rows, std::int64_t columns) {
  inputs.begin();
  Numbers numbers{.tokens = inputs.add({rows}, at::kLong),
                  .lengths = inputs.add({rows}, at::kInt),
                  .tables = inputs.add({rows, columns}, at::kInt),
                  .bytes = inputs.add({3 * rows}, at::kByte)};
  for (std::int64_t i = 0; i < rows; ++i) {
    numbers.tokens.data<std::int64_t>()[i] = i * i;
    numbers.lengths.data<std::int32_t>()[i] = static_cast<std::int32_t>(i + 1);
  }
  for (std::int64_t i = 0; i < rows * columns; ++i)
    numbers.tables.data<std::int32_t>()[i] = static_cast<std::int32_t>(7 * i);
  for (std::int64_t i = 0; i < 3 * rows; ++i)
    numbers.bytes.data<std::uint8_t>()[i] = static_cast<std::uint8_t>(i);
  return numbers;
}

void expect_uploaded(const StepInputs& inputs,
                     const Numbers& numbers,
                     const at::Tensor& tokens,
                     std::int64_t columns) {
  const auto rows = tokens.size(0);
  EXPECT_TRUE(at::equal(inputs.on_device(numbers.tokens).cpu(), tokens)) << rows;
  EXPECT_TRUE(at::equal(inputs.on_device(numbers.lengths).cpu(), at::arange(1, rows + 1, at::kInt)))
      << rows;
  EXPECT_TRUE(at::equal(inputs.on_device(numbers.tables).cpu(),
                        at::arange(0, 7 * rows * columns, 7, at::kInt).view({rows, columns})))
      << rows;
  EXPECT_TRUE(at::equal(inputs.on_device(numbers.bytes).cpu(),
                        at::arange(0, 3 * rows, at::kLong).to(at::kByte)))
      << rows;
}

const std::vector<std::int64_t> kRows{1, 2, 7, 64, 300, 20000};
constexpr std::int64_t kCapacity = 2 << 20;

TEST(StepInputs, ArraysOfTheSameShapesLieInTheSamePlacesAndApart) {
  StepInputs inputs(kCapacity, at::kCPU);
  for (const auto rows : kRows) {
    const auto first = lay_out(inputs, rows, 5);
    inputs.upload({});
    expect_uploaded(inputs, first, at::arange(rows).square(), 5);
    const auto again = lay_out(inputs, rows, 5);
    EXPECT_EQ(first.tables.offset, again.tables.offset);
    EXPECT_EQ(first.bytes.offset, again.bytes.offset);
    EXPECT_EQ(first.tables.offset % 16, 0);
  }
  inputs.begin();
  EXPECT_EQ(inputs.on_device(inputs.add({0, 4}, at::kLong)).sizes(), at::IntArrayRef({0, 4}));
  EXPECT_ANY_THROW(inputs.add({kCapacity + 1}, at::kByte));
}

TEST(StepInputs, AGpuTakesTokensThatItHasDrawn) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const at::Device gpu(at::kCUDA, 0);
  StepInputs inputs(kCapacity, gpu);
  for (const auto rows : kRows) {
    const auto drawn = at::randint(1, 200000, {rows}, at::TensorOptions(at::kLong).device(gpu));
    const auto host_drawn = drawn.cpu();
    // Some rows, or all, in another order than they were drawn in.
    for (const std::int64_t unknown : {std::int64_t{0}, std::int64_t{1}, rows}) {
      const auto numbers = lay_out(inputs, rows, 5);
      auto expected = at::arange(rows).square();
      for (std::int64_t i = 0; i < unknown; ++i) {
        numbers.tokens.data<std::int64_t>()[rows - 1 - i] = -1 - i;
        expected[rows - 1 - i] = host_drawn[i];
      }
      inputs.upload(drawn);
      expect_uploaded(inputs, numbers, expected, 5);
    }
  }
}

TEST(StepInputs, WhatIsDrawnComesDown) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const auto pinned = at::TensorOptions().pinned_memory(true);
  const DrawnNumbers host{.tokens = at::zeros({20000}, pinned.dtype(at::kLong)),
                          .logprobs = at::zeros({20000}, pinned.dtype(at::kFloat)),
                          .processed_logprobs = at::zeros({20000}, pinned.dtype(at::kFloat))};
  for (const auto rows : kRows) {
    const DrawnNumbers device{.tokens = at::randint(200000, {rows}, at::kLong).cuda(),
                              .logprobs = at::randn({rows}).cuda(),
                              .processed_logprobs = at::randn({rows}).cuda()};
    download_step(device, host);
    const auto expected = device.tokens.cpu();  // waits
    EXPECT_TRUE(at::equal(host.tokens.narrow(0, 0, rows), expected)) << rows;
    EXPECT_TRUE(at::equal(host.logprobs.narrow(0, 0, rows), device.logprobs.cpu())) << rows;
    EXPECT_TRUE(
        at::equal(host.processed_logprobs.narrow(0, 0, rows), device.processed_logprobs.cpu()))
        << rows;
  }
}

}  // namespace step_inputs_test
}  // namespace ferry::rollout
