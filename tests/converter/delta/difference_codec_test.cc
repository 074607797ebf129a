#include "converter/delta/difference_codec.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <tuple>

#include "tests/support/expect.h"

namespace ferry::converter {
namespace difference_codec_test {

using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::size_t size, std::mt19937_64& random) {
  Bytes bytes(size);
  for (auto& one : bytes) one = static_cast<std::byte>(random());
  return bytes;
}

// Changes about one in `one_in` elements: to a neighbour or to anything.
Bytes changed(Bytes bytes,
              std::int64_t element_size,
              std::uint64_t one_in,
              std::mt19937_64& random) {
  for (std::size_t at = 0; at < bytes.size(); at += static_cast<std::size_t>(element_size)) {
    if (random() % one_in != 0) continue;
    if (random() % 2 == 0) {
      bytes[at] = static_cast<std::byte>(std::to_integer<int>(bytes[at]) + 1);
    } else {
      const auto other = random();
      std::memcpy(bytes.data() + at, &other, static_cast<std::size_t>(element_size));
    }
  }
  return bytes;
}

// Size of an element, one element in how many changes.
class DifferenceCodecOf : public testing::TestWithParam<std::tuple<std::int64_t, std::uint64_t>> {};

TEST_P(DifferenceCodecOf, RandomElementsGivesEveryBitBack) {
  const auto [element_size, one_in] = GetParam();
  std::mt19937_64 random(static_cast<std::uint64_t>(element_size) * 1000 + one_in);
  DifferenceCodec codec;
  for (const std::size_t count : {1U, 2U, 3U, 255U, 256U, 257U, 5000U, 40'001U}) {
    const auto old = random_bytes(count * static_cast<std::size_t>(element_size), random);
    const auto now = changed(old, element_size, one_in, random);
    const auto difference = codec.encode(old, now, element_size, "w[0]");
    EXPECT_EQ(difference.num_changed,
              static_cast<std::int64_t>(changed_elements(old, now, element_size).size()));
    auto found = old;
    codec.apply(difference.encoded, element_size, "w[0]", found);
    EXPECT_TRUE(support::same_bytes(now, found)) << count << " elements";
  }
}

INSTANTIATE_TEST_SUITE_P(Elements,
                         DifferenceCodecOf,
                         testing::Combine(testing::Values(1, 2, 4, 8),
                                          testing::Values(1U, 2U, 3U, 4U, 5U, 100U, 3000U)));

TEST(DifferenceCodec, CarriesNansAndSignsOfZero) {
  const std::vector<std::uint16_t> old{0x0000, 0x8000, 0x7FC0, 0x3F80, 0xFFFF};
  const std::vector<std::uint16_t> now{0x8000, 0x0000, 0xFFC1, 0x7FC0, 0x0000};
  DifferenceCodec codec;
  const auto difference =
      codec.encode(std::as_bytes(std::span(old)), std::as_bytes(std::span(now)), 2, "w[0]");
  auto found = old;
  codec.apply(difference.encoded, 2, "w[0]", std::as_writable_bytes(std::span(found)));
  EXPECT_EQ(found, now);
}

TEST(DifferenceCodec, NeedsAboutABytePerRareChange) {
  std::mt19937_64 random(7);
  const auto old = random_bytes(2 << 20, random);
  auto now = old;
  std::int64_t count = 0;
  for (std::size_t at = 0; at < now.size(); at += 2) {
    if (random() % 60 != 0) continue;
    now[at] ^= std::byte{1};
    ++count;
  }
  const auto difference = DifferenceCodec().encode(old, now, 2, "w[0]");
  EXPECT_LT(static_cast<double>(difference.encoded.size()) / static_cast<double>(count), 1.4);
}

// Any damaged byte is an error, or changes nothing.
TEST(DifferenceCodec, NoticesEveryDamagedByte) {
  std::mt19937_64 random(3);
  const auto old = random_bytes(4000, random);
  for (const std::uint64_t one_in : {2U, 50U}) {
    const auto now = changed(old, 2, one_in, random);
    DifferenceCodec codec;
    const auto encoded = codec.encode(old, now, 2, "w[0]").encoded;
    for (std::size_t at = 0; at < encoded.size(); ++at) {
      auto damaged = encoded;
      damaged[at] ^= std::byte{0x40};
      auto found = old;
      try {
        codec.apply(damaged, 2, "w[0]", found);
        EXPECT_TRUE(support::same_bytes(now, found)) << "byte " << at;
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kCorrupt) << "byte " << at;
      }
    }
  }
}

TEST(DifferenceCodec, NoticesAChunkInThePlaceOfAnother) {
  std::mt19937_64 random(4);
  const auto old = random_bytes(4000, random);
  const auto now = changed(old, 2, 50, random);
  DifferenceCodec codec;
  const auto encoded = codec.encode(old, now, 2, "w[0]").encoded;
  auto found = old;
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"CRC-32"},
                             [&] { codec.apply(encoded, 2, "w[1]", found); }));
}

}  // namespace difference_codec_test
}  // namespace ferry::converter
