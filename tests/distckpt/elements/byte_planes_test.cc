#include "distckpt/elements/byte_planes.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/support/expect.h"

namespace ferry::distckpt {
namespace byte_planes_test {

std::vector<std::byte> counted(std::size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 151 + i / 256);
  return bytes;
}

// Lengths around those of vectors and of blocks.
TEST(BytePlanes, HoldByteAfterByteOfEveryElementAndComeTogetherAgain) {
  for (const std::int64_t size : {1, 2, 4, 8}) {
    for (const std::int64_t count : {0, 1, 2, 7, 15, 16, 17, 31, 33, 64, 127, 1000, 4097, 70001}) {
      const auto elements = counted(static_cast<std::size_t>(size * count));
      std::vector<std::byte> planes(elements.size());
      std::vector<std::byte> scratch;
      split_planes(elements, size, planes, scratch);
      std::vector<const std::byte*> begins;
      for (std::int64_t plane = 0; plane < size; ++plane) {
        begins.push_back(planes.data() + plane * count);
        for (std::int64_t i = 0; i < count; ++i)
          ASSERT_EQ(begins.back()[i], elements[static_cast<std::size_t>(i * size + plane)])
              << "byte " << plane << " of element " << i << " of " << count;
      }
      std::vector<std::byte> back(elements.size());
      join_planes(begins, back, scratch);
      ASSERT_TRUE(support::same_bytes(elements, back)) << size << " x " << count;
    }
  }
}

// Planes lie so in an archive: each decoded into a place of its own.
TEST(BytePlanes, ComeTogetherFromPlacesApart) {
  const auto low = counted(37);
  std::vector<std::byte> high(37, std::byte{0x3F});
  std::vector<std::byte> elements(74);
  std::vector<std::byte> scratch;
  const std::byte* const planes[] = {low.data(), high.data()};
  join_planes(planes, elements, scratch);
  for (std::size_t i = 0; i < 37; ++i) {
    ASSERT_EQ(elements[2 * i], low[i]);
    ASSERT_EQ(elements[2 * i + 1], std::byte{0x3F});
  }
}

}  // namespace byte_planes_test
}  // namespace ferry::distckpt
