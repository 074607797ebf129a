#include "models/reshard/message_delta.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace ferry::models {
namespace message_delta_test {

// Bytes of words of 16 bits: 0, 1, 2, ...
at::Tensor words(std::int64_t count) {
  return at::arange(count, at::kShort).view(at::kByte);
}

// Another message, in which these words are others.
at::Tensor changed(const at::Tensor& message, const std::vector<std::int64_t>& at) {
  auto copy = message.clone();
  for (const auto word : at) copy.view(at::kShort)[word] -= 1000;
  return copy;
}

// Two blocks, whose numbers of changes take 2 bytes each, and of each change a place and a value: 3
// bytes, padded to an even number.
TEST(EncodeChanges, TakesThreeBytesAChangeAndTwoABlock) {
  const auto before = words(300);
  EXPECT_EQ(encode_changes(changed(before, {0}), before).numel(), 4 + 1 + 1 + 2);
  EXPECT_EQ(encode_changes(changed(before, {0, 299}), before).numel(), 4 + 2 + 4);
}

TEST(EncodeChanges, WritesTheFormatOfTheHeader) {
  const auto before = words(300);
  const auto found = encode_changes(changed(before, {5, 256}), before);
  const auto* const bytes = found.const_data_ptr<std::uint8_t>();
  const std::vector<int> expected{1, 0, 1, 0, 5, 0};  // counts of both blocks; places
  EXPECT_EQ(std::vector<int>(bytes, bytes + 6), expected);
  EXPECT_EQ(found.narrow(0, 6, 4).clone().view(at::kShort)[0].item<int>(), 5 - 1000);
}

TEST(EncodeChanges, SaysThatNothingChanged) {
  const auto found = encode_changes(words(300), words(300));
  ASSERT_TRUE(found.defined());
  EXPECT_EQ(found.numel(), 0);
}

TEST(EncodeChanges, LeavesAMessageThatChangedTooMuch) {
  const auto before = words(300);
  EXPECT_FALSE(encode_changes(before + 1, before).defined());
}

class AppliedChanges : public testing::TestWithParam<std::vector<std::int64_t>> {};

TEST_P(AppliedChanges, MakeTheMessageAnew) {
  const auto before = words(700);
  const auto now = changed(before, GetParam());
  auto known = before.clone();
  apply_changes(encode_changes(now, before), known);
  EXPECT_TRUE(known.equal(now));
}

INSTANTIATE_TEST_SUITE_P(Words,
                         AppliedChanges,
                         testing::Values(std::vector<std::int64_t>{},
                                         std::vector<std::int64_t>{0},
                                         std::vector<std::int64_t>{699},
                                         std::vector<std::int64_t>{255, 256, 257},
                                         std::vector<std::int64_t>{1, 2, 3, 511, 512, 600}));

}  // namespace message_delta_test
}  // namespace ferry::models
