#include "distckpt/execute/plane_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numbers>

#include "distckpt/elements/byte_planes.h"
#include "distckpt/elements/crc32.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/random_boxes.h"
#include "tests/support/seed_blocks.h"

namespace ferry::distckpt {
namespace plane_codec_test {

using support::fails;
using support::Random;
using support::same_bytes;

// Weights as models have them: normal numbers in bf16.
std::vector<std::byte> weights(Random& random, std::int64_t count) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(2 * count));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto uniform = [&] { return (static_cast<double>(random.bits() >> 11) + 1) * 0x1p-53; };
    const auto value = static_cast<float>(0.02 * std::sqrt(-2 * std::log(uniform())) *
                                          std::cos(2 * std::numbers::pi * uniform()));
    std::memcpy(&bytes[static_cast<std::size_t>(2 * i)], reinterpret_cast<const char*>(&value) + 2,
                2);
  }
  return bytes;
}

void expect_there_and_back(PlaneCodec& codec,
                           std::span<const std::byte> bytes,
                           std::int64_t element_size) {
  const auto encoded = codec.encode(bytes, element_size, "w[0:1]");
  EXPECT_LE(std::ssize(encoded), max_encoded_size(std::ssize(bytes), element_size));
  std::vector<std::byte> decoded(bytes.size());
  codec.decode(encoded, element_size, "w[0:1]", decoded);
  EXPECT_TRUE(same_bytes(bytes, decoded));
  EXPECT_EQ(encoded, PlaneCodec().encode(bytes, element_size, "w[0:1]"));
}

TEST(BytePlanes, PlanePHoldsByteP) {
  Random random(1);
  for (const std::int64_t size : {1, 2, 4, 8}) {
    for (const std::int64_t count : {0, 1, 7, 16, 33, 1000}) {
      const auto elements = random.bytes(size * count);
      std::vector<std::byte> planes(elements.size());
      std::vector<std::byte> scratch;
      split_planes(elements, size, planes, scratch);
      std::vector<const std::byte*> begins;
      for (std::int64_t p = 0; p < size; ++p) {
        begins.push_back(planes.data() + p * count);
        for (std::int64_t i = 0; i < count; ++i) {
          ASSERT_EQ(planes[static_cast<std::size_t>(p * count + i)],
                    elements[static_cast<std::size_t>(i * size + p)]);
        }
      }
      std::vector<std::byte> joined(elements.size());
      join_planes(begins, joined, scratch);
      EXPECT_TRUE(same_bytes(elements, joined));
    }
  }
}

class RandomBytesInPlanes : public support::SeedBlocks {};
INSTANTIATE_TEST_SUITE_P(Blocks, RandomBytesInPlanes, RandomBytesInPlanes::all());

TEST_P(RandomBytesInPlanes, AreGivenBack) {
  PlaneCodec codec;
  for_each_seed(0, 299, [&](std::uint64_t seed) {
    Random random(seed);
    const auto element_size = std::int64_t{1} << random.between(0, 3);
    const auto count = random.chance(20) ? random.between(1, 3) : random.between(1, 20'000);
    auto bytes = random.bytes(count * element_size);
    // Noise to a single value, in each byte of an element by itself.
    for (std::int64_t p = 0; p < element_size; ++p) {
      const auto mask = static_cast<std::byte>((1 << random.between(0, 8)) - 1);
      for (std::int64_t i = 0; i < count; ++i)
        bytes[static_cast<std::size_t>(i * element_size + p)] &= mask;
    }
    expect_there_and_back(codec, bytes, element_size);
  });
}

TEST(PlaneCodec, GivesBackRealWeights) {
  PlaneCodec codec;
  for (const auto* name : {"hf_llama/hf/model.safetensors", "hf_qwen2/hf/model.safetensors"}) {
    auto bytes = support::read_bytes(support::test_data(name));
    bytes.resize(bytes.size() / 8 * 8);
    for (const std::int64_t element_size : {1, 2, 4, 8})
      expect_there_and_back(codec, bytes, element_size);
  }
}

// The purpose of the format: signs and exponents of bf16 have some 2.6 bits of entropy, of 8.
TEST(PlaneCodec, MakesWeightsSmallerByAThird) {
  Random random(5);
  const auto bytes = weights(random, 1 << 19);
  const auto encoded = PlaneCodec().encode(bytes, 2, "w");
  EXPECT_GE(static_cast<double>(bytes.size()) / static_cast<double>(encoded.size()), 1.45);
}

TEST(PlaneCodec, NoticesEveryBitThatChanges) {
  Random random(2);
  PlaneCodec codec;
  const auto bytes = weights(random, 300);
  const auto encoded = codec.encode(bytes, 2, "w[0:300]");
  std::vector<std::byte> decoded(bytes.size());
  for (std::size_t i = 0; i < encoded.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      auto damaged = encoded;
      damaged[i] ^= static_cast<std::byte>(1 << bit);
      ASSERT_TRUE(fails(ErrorKind::kCorrupt, {"CRC-32"},
                        [&] { codec.decode(damaged, 2, "w[0:300]", decoded); }));
    }
  }
}

TEST(PlaneCodec, NoticesAChunkInThePlaceOfAnother) {
  Random random(3);
  PlaneCodec codec;
  const auto bytes = weights(random, 300);
  const auto encoded = codec.encode(bytes, 2, "q[0:300]");
  std::vector<std::byte> decoded(bytes.size());
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"CRC-32"},
                    [&] { codec.decode(encoded, 2, "k[0:300]", decoded); }));
}

// Chunks that somebody made up, with the right checksum.
TEST(PlaneCodec, RefusesWhatNoEncoderWrites) {
  Random random(4);
  PlaneCodec codec;
  const auto bytes = weights(random, 300);
  const auto good = codec.encode(bytes, 2, "w");
  std::vector<std::byte> decoded(bytes.size());
  const auto seal = [](std::vector<std::byte> chunk) {
    const auto crc = crc32(std::span(chunk).subspan(4), crc32(std::as_bytes(std::span("w", 1))));
    std::memcpy(chunk.data(), &crc, sizeof crc);
    return chunk;
  };
  const auto refused = [&](const std::vector<std::byte>& chunk) {
    return fails(ErrorKind::kCorrupt, {"the chunk"},
                 [&] { codec.decode(seal(chunk), 2, "w", decoded); });
  };
  for (std::size_t size = 4; size < good.size(); ++size)
    EXPECT_TRUE(refused({good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)}));
  auto longer = good;
  longer.push_back(std::byte{0});
  EXPECT_TRUE(refused(longer));
  for (const std::size_t at : {4, 5, 7, 8, 9, 11}) {  // the lengths of the planes
    for (int bit = 0; bit < 8; ++bit) {
      auto other = good;
      other[at] ^= static_cast<std::byte>(1 << bit);
      EXPECT_TRUE(refused(other)) << at;
    }
  }
  // Anything may stand in a plane, but nothing is written beyond it.
  for (int i = 0; i < 2000; ++i) {
    auto other = good;
    for (int n = 0; n < 3; ++n)
      other[static_cast<std::size_t>(random.between(4, std::ssize(good) - 1))] =
          std::byte(random.bits());
    try {
      codec.decode(seal(other), 2, "w", decoded);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kCorrupt);
    }
  }
}

}  // namespace plane_codec_test
}  // namespace ferry::distckpt
