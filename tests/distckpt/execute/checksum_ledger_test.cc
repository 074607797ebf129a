#include "distckpt/execute/checksum_ledger.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/random_boxes.h"

namespace ferry::distckpt {
namespace checksum_ledger_test {

using support::Random;

struct Part {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// [0, size) in up to `cuts` + 1 parts, in random order.
std::vector<Part> random_parts(Random& random, std::int64_t size, int cuts) {
  std::vector<std::int64_t> at{0, size};
  for (int i = 0; i < cuts; ++i) at.push_back(random.between(0, size));
  std::ranges::sort(at);
  std::vector<Part> parts;
  for (std::size_t i = 0; i + 1 < at.size(); ++i) {
    if (at[i] < at[i + 1]) parts.push_back({at[i], at[i + 1]});
  }
  random.shuffle(parts);
  return parts;
}

// Does as a source or sink does: checksums the part of `file` and commits.
void pass(ChecksumLedger& ledger, std::span<const std::byte> file, const Part& part) {
  std::vector<ChecksumPart> parts;
  ledger.checksum(0, part.begin,
                  file.subspan(static_cast<std::size_t>(part.begin),
                               static_cast<std::size_t>(part.end - part.begin)),
                  parts);
  ledger.commit(parts);
}

TEST(ChecksumLedger, PartsInAnyOrderCombineToTheChecksumOfTheWhole) {
  Random random(2);
  for (int i = 0; i < 300; ++i) {
    const auto file = random.bytes(random.between(10, 5000));
    const auto size = std::ssize(file);
    const auto begin = random.between(0, size - 2);
    const auto end = random.between(begin + 1, size);
    ChecksumLedger ledger;
    const auto range = ledger.add_range({.storage = 0, .offset = begin, .size = end - begin});
    ledger.seal();
    for (const auto& part : random_parts(random, size, 12)) pass(ledger, file, part);
    ASSERT_EQ(ledger.combined(range),
              crc32(std::span(file).subspan(static_cast<std::size_t>(begin),
                                            static_cast<std::size_t>(end - begin))));
  }
}

TEST(ChecksumLedger, KeepsManyRangesOfManyStoragesApart) {
  Random random(3);
  const auto file = random.bytes(20'000);
  const auto other = random.bytes(20'000);
  ChecksumLedger ledger;
  std::vector<ChecksumRange> ranges;
  for (std::int64_t at = 0; at < 19'000; at += random.between(200, 900)) {
    for (const StorageId storage : {0U, 7U}) {
      ranges.push_back({.storage = storage, .offset = at, .size = random.between(0, 200)});
    }
  }
  random.shuffle(ranges);
  for (const auto& range : ranges) ledger.add_range(range);
  ledger.seal();
  std::vector<ChecksumPart> found;
  for (const auto& part : random_parts(random, 20'000, 100)) {
    const auto from = static_cast<std::size_t>(part.begin);
    const auto count = static_cast<std::size_t>(part.end - part.begin);
    ledger.checksum(0, part.begin, std::span(file).subspan(from, count), found);
    ledger.checksum(7, part.begin, std::span(other).subspan(from, count), found);
    ledger.checksum(3, part.begin, std::span(other).subspan(from, count), found);
  }
  ledger.commit(found);
  for (std::uint32_t i = 0; i < ranges.size(); ++i) {
    const auto& bytes = ranges[i].storage == 0 ? file : other;
    ASSERT_EQ(ledger.combined(i),
              crc32(std::span(bytes).subspan(static_cast<std::size_t>(ranges[i].offset),
                                             static_cast<std::size_t>(ranges[i].size))));
  }
}

TEST(ChecksumLedger, AnEmptyRangeTakesNothingFromTheOneThatBeginsWithIt) {
  const auto file = Random(4).bytes(100);
  for (const bool empty_first : {true, false}) {
    ChecksumLedger ledger;
    const ChecksumRange empty{.storage = 0, .offset = 10, .size = 0};
    const ChecksumRange full{.storage = 0, .offset = 10, .size = 50};
    ledger.add_range(empty_first ? empty : full);
    ledger.add_range(empty_first ? full : empty);
    ledger.seal();
    pass(ledger, file, {.begin = 0, .end = 30});
    pass(ledger, file, {.begin = 30, .end = 100});
    EXPECT_EQ(ledger.combined(empty_first ? 0 : 1), 0U);
    EXPECT_EQ(ledger.combined(empty_first ? 1 : 0), crc32(std::span(file).subspan(10, 50)));
  }
}

// A task of a tensor that lies transposed has a run of each of its rows.
TEST(ChecksumLedger, RunsOfATransposedTensorCombine) {
  constexpr std::int64_t kRows = 3000;
  constexpr std::int64_t kRow = 40;
  Random random(7);
  const auto file = random.bytes(kRows * kRow);
  ChecksumLedger ledger;
  ledger.add_range({.storage = 0, .offset = 0, .size = kRows * kRow});
  ledger.seal();
  auto columns = random_parts(random, kRow, 6);
  columns.push_back(columns.front());  // read twice
  for (const auto& column : columns) {
    EXPECT_EQ(ledger.combined(0).has_value(), &column == &columns.back());
    std::vector<ChecksumPart> task;
    for (std::int64_t row = 0; row < kRows; ++row) {
      const auto begin = row * kRow + column.begin;
      ledger.checksum(0, begin,
                      std::span(file).subspan(static_cast<std::size_t>(begin),
                                              static_cast<std::size_t>(column.end - column.begin)),
                      task);
    }
    ledger.commit(task);
  }
  EXPECT_EQ(ledger.combined(0), crc32(file));
}

TEST(ChecksumLedger, GapsAndOverlapsGiveNothing) {
  const auto file = Random(5).bytes(100);
  const auto combine = [&](std::initializer_list<Part> parts) {
    ChecksumLedger ledger;
    ledger.add_range({.storage = 0, .offset = 0, .size = 100});
    ledger.seal();
    for (const auto& part : parts) pass(ledger, file, part);
    return ledger.combined(0);
  };
  EXPECT_EQ(combine({{50, 100}, {0, 50}}), crc32(file));
  EXPECT_EQ(combine({}), std::nullopt);
  EXPECT_EQ(combine({{0, 50}}), std::nullopt);
  EXPECT_EQ(combine({{50, 100}}), std::nullopt);
  EXPECT_EQ(combine({{0, 50}, {51, 100}}), std::nullopt);
  EXPECT_EQ(combine({{0, 50}, {49, 100}}), std::nullopt);
  EXPECT_EQ(combine({{0, 60}, {60, 100}, {0, 60}}), crc32(file));   // the same part, read twice
  EXPECT_EQ(combine({{0, 50}, {50, 100}, {20, 30}}), crc32(file));  // a part of one, read again
  EXPECT_EQ(combine({{0, 50}, {50, 100}, {40, 60}}), std::nullopt);
}

TEST(ChecksumLedger, TakesPartsFromManyThreads) {
  Random random(6);
  const auto file = random.bytes(100'000);
  ChecksumLedger ledger;
  for (std::int64_t at = 0; at < 100'000; at += 1000) {
    ledger.add_range({.storage = 0, .offset = at, .size = 1000});
  }
  ledger.seal();
  const auto parts = random_parts(random, 100'000, 400);
  std::vector<std::jthread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = t; i < parts.size(); i += 4) pass(ledger, file, parts[i]);
    });
  }
  threads.clear();
  for (std::uint32_t i = 0; i < 100; ++i) {
    ASSERT_EQ(ledger.combined(i), crc32(std::span(file).subspan(std::size_t{i} * 1000, 1000)));
  }
}

TEST(ChecksumLedger, MustBeSealedBeforeUse) {
  ChecksumLedger ledger;
  ledger.add_range({.storage = 0, .offset = 0, .size = 10});
  std::vector<ChecksumPart> parts;
  EXPECT_TRUE(support::fails(ErrorKind::kBug, {"sealed"},
                             [&] { ledger.checksum(0, 0, as_bytes("x"), parts); }));
}

}  // namespace checksum_ledger_test
}  // namespace ferry::distckpt
