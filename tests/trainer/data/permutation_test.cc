#include "trainer/data/permutation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace permutation_test {

std::vector<std::uint64_t> all(std::uint64_t n, std::uint64_t key) {
  const Permutation permutation(n, key);
  std::vector<std::uint64_t> values;
  for (std::uint64_t i = 0; i < n; ++i) values.push_back(permutation(i));
  return values;
}

TEST(Permutation, HasEachNumberOnce) {
  for (const std::uint64_t n : {1U, 2U, 3U, 1023U, 1024U, 1025U, 5000U}) {
    auto values = all(n, 42);
    std::ranges::sort(values);
    for (std::uint64_t i = 0; i < n; ++i) ASSERT_EQ(values[i], i) << n;
  }
}

TEST(Permutation, DependsOnTheKey) {
  EXPECT_NE(all(100, 1), all(100, 2));
  EXPECT_EQ(all(100, 1), all(100, 1));
}

TEST(Permutation, ReachesAllOrdersOfAFew) {
  std::set<std::vector<std::uint64_t>> orders;
  for (std::uint64_t key = 0; key < 2000; ++key) orders.insert(all(4, key));
  EXPECT_EQ(orders.size(), 24U);
}

TEST(Permutation, HoldsNumbersOf63Bits) {
  constexpr std::uint64_t kMany = std::uint64_t{1} << 62;
  const Permutation permutation(kMany, 7);
  for (const std::uint64_t i : {std::uint64_t{0}, kMany / 2, kMany - 1})
    EXPECT_LT(permutation(i), kMany);
  EXPECT_NE(permutation(0), permutation(kMany - 1));
}

TEST(Permutation, RefusesANumberBeyondItsOwn) {
  const Permutation permutation(5, 1);
  EXPECT_TRUE(
      support::fails(ErrorKind::kBug, {"permutation of 5", "number 5"}, [&] { permutation(5); }));
}

TEST(Derive, SeparatesKeysAndNumbers) {
  std::set<std::uint64_t> found;
  for (std::uint64_t key = 0; key < 30; ++key)
    for (std::uint64_t number = 0; number < 30; ++number) found.insert(derive(key, number));
  EXPECT_EQ(found.size(), 900U);
}

}  // namespace permutation_test
}  // namespace ferry::trainer
