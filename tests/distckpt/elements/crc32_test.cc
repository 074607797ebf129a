#include "distckpt/elements/crc32.h"

#include <gtest/gtest.h>

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/support/random_boxes.h"

namespace ferry::distckpt {
namespace crc32_test {

using support::Random;

// The definition, bit by bit: polynomial 0xEDB88320, as zip has it.
std::uint32_t naive_crc(std::span<const std::byte> bytes) {
  std::uint32_t crc = 0xFFFFFFFF;
  for (const auto byte : bytes) {
    crc ^= std::to_integer<std::uint32_t>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1U) != 0 ? 0xEDB88320U : 0U);
  }
  return ~crc;
}

#ifdef __x86_64__
// XINUSE, bit 2: the upper halves of ymm registers hold something.
[[gnu::target("avx,xsavec")]] bool upper_halves_are_dirty() {
  return (_xgetbv(1) & 4U) != 0;
}
[[gnu::target("avx")]] void clear_upper_halves() {
  _mm256_zeroupper();
}

TEST(Crc32, LeavesNoVectorRegisterDirty) {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  __cpuid_count(0xd, 1, eax, ebx, ecx, edx);
  if (!__builtin_cpu_supports("avx") || (eax & 4U) == 0)
    GTEST_SKIP() << "the processor does not tell which vector registers are in use";
  const std::vector<std::byte> bytes(1 << 20);
  clear_upper_halves();
  ASSERT_FALSE(upper_halves_are_dirty());
  EXPECT_NE(crc32(bytes), 0U);
  EXPECT_FALSE(upper_halves_are_dirty());
}
#endif

TEST(Crc32, IsThatOfZip) {
  EXPECT_EQ(crc32(as_bytes("123456789")), 0xCBF43926U);
  EXPECT_EQ(crc32({}), 0U);
  Random random(1);
  for (int i = 0; i < 50; ++i) {
    const auto bytes = random.bytes(random.between(0, 3000));
    ASSERT_EQ(crc32(bytes), naive_crc(bytes));
  }
}

TEST(Crc32, OfEveryLengthGoesOnFromEveryOther) {
  Random random(2);
  const auto bytes = random.bytes(1500);
  const auto all = std::span<const std::byte>(bytes);
  for (std::size_t size = 0; size < 700; ++size) {
    const auto first = static_cast<std::size_t>(random.between(0, 800));
    const auto before = crc32(all.first(first));
    ASSERT_EQ(crc32(all.subspan(first, size), before), naive_crc(all.first(first + size)))
        << size << " bytes behind " << first;
  }
}

}  // namespace crc32_test
}  // namespace ferry::distckpt
