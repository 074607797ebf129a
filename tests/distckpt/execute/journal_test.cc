#include "distckpt/execute/journal.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <thread>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/random_boxes.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace journal_test {

namespace fs = std::filesystem;
using support::fails;
using support::Random;
using support::TempDir;

const Digest kPlan = digest_block(as_bytes("this plan"));
const Digest kOtherPlan = digest_block(as_bytes("another plan"));

TaskRecord make_record(std::uint32_t task) {
  Random random(task);
  TaskRecord record{.task = task};
  for (auto i = random.between(0, 3); i > 0; --i) {
    record.blocks.push_back(digest_block(random.bytes(8)));
  }
  for (auto* const parts : {&record.read, &record.written}) {
    for (auto i = random.between(0, 3); i > 0; --i) {
      parts->push_back({.storage = task,
                        .crc = static_cast<std::uint32_t>(random.bits()),
                        .offset = random.between(0, 1000),
                        .size = random.between(0, 1000)});
    }
  }
  return record;
}

void write_journal(const fs::path& path, std::uint32_t num_tasks) {
  Journal journal(path, kPlan, false);
  for (std::uint32_t task = 0; task < num_tasks; ++task) journal.append(make_record(task));
}

void expect_parts(const std::vector<ChecksumPart>& expected,
                  const std::vector<ChecksumPart>& found) {
  ASSERT_EQ(expected.size(), found.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(expected[i].storage, found[i].storage);
    EXPECT_EQ(expected[i].crc, found[i].crc);
    EXPECT_EQ(expected[i].offset, found[i].offset);
    EXPECT_EQ(expected[i].size, found[i].size);
  }
}

void expect_record(const Journal& journal, std::uint32_t task) {
  const auto* found = journal.finished(task);
  ASSERT_NE(found, nullptr) << "task " << task;
  const auto expected = make_record(task);
  EXPECT_EQ(found->task, task);
  EXPECT_EQ(found->blocks, expected.blocks);
  expect_parts(expected.read, found->read);
  expect_parts(expected.written, found->written);
}

TEST(Journal, HoldsAfterResumeWhatWasAppendedBefore) {
  const TempDir dir;
  write_journal(dir / "journal", 20);
  const Journal journal(dir / "journal", kPlan, true);
  EXPECT_EQ(journal.num_finished(), 20U);
  for (std::uint32_t task = 0; task < 20; ++task) expect_record(journal, task);
  EXPECT_EQ(journal.finished(20), nullptr);
}

TEST(Journal, StartsAnewUnlessResumed) {
  const TempDir dir;
  write_journal(dir / "journal", 5);
  EXPECT_EQ(Journal(dir / "journal", kPlan, false).num_finished(), 0U);
  EXPECT_EQ(Journal(dir / "journal", kPlan, true).num_finished(), 0U);
}

TEST(Journal, ResumeWithoutALogStartsOne) {
  const TempDir dir;
  { Journal(dir / "journal", kPlan, true).append(make_record(3)); }
  expect_record(Journal(dir / "journal", kPlan, true), 3);
}

TEST(Journal, RefusesTheLogOfAnotherPlan) {
  const TempDir dir;
  write_journal(dir / "journal", 5);
  const auto before = support::read_bytes(dir / "journal");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"journal", "another source or other options", "hint"},
                    [&] { Journal(dir / "journal", kOtherPlan, true); }));
  EXPECT_TRUE(support::same_bytes(before, support::read_bytes(dir / "journal")));
}

TEST(Journal, RefusesAFileThatIsNoLog) {
  const TempDir dir;
  write_text(dir / "journal", std::string(200, 'x'));
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"journal"}, [&] { Journal(dir / "journal", kPlan, true); }));
}

// Wherever an interruption cuts the log, the records before the cut are there and further ones can
// be appended.
TEST(Journal, IgnoresATornTailAtEveryByte) {
  const TempDir dir;
  write_journal(dir / "whole", 4);
  const auto bytes = support::read_bytes(dir / "whole");
  std::size_t last = 0;
  for (std::size_t size = 0; size <= bytes.size(); ++size) {
    support::write_bytes(dir / "torn", std::span(bytes).first(size));
    {
      Journal journal(dir / "torn", kPlan, true);
      const auto count = journal.num_finished();
      ASSERT_GE(count, last) << "cut at " << size;
      last = count;
      for (std::uint32_t task = 0; task < count; ++task) expect_record(journal, task);
      journal.append(make_record(77));
    }
    const Journal journal(dir / "torn", kPlan, true);
    ASSERT_EQ(journal.num_finished(), last + 1) << "cut at " << size;
    expect_record(journal, 77);
  }
  EXPECT_EQ(last, 4U);
}

TEST(Journal, ADamagedRecordEndsTheLog) {
  const TempDir dir;
  write_journal(dir / "whole", 6);
  const auto bytes = support::read_bytes(dir / "whole");
  for (std::int64_t at = 32; at < std::ssize(bytes); ++at) {
    support::write_bytes(dir / "damaged", bytes);
    support::corrupt(dir / "damaged", at);
    const Journal journal(dir / "damaged", kPlan, true);
    ASSERT_LT(journal.num_finished(), 6U) << "byte " << at;
    for (std::uint32_t task = 0; task < journal.num_finished(); ++task) {
      expect_record(journal, task);
    }
  }
}

TEST(Journal, TakesRecordsFromManyThreads) {
  const TempDir dir;
  {
    Journal journal(dir / "journal", kPlan, false);
    std::vector<std::jthread> threads;
    for (std::uint32_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (std::uint32_t i = 0; i < 100; ++i) journal.append(make_record(4 * i + t));
      });
    }
  }
  const Journal journal(dir / "journal", kPlan, true);
  EXPECT_EQ(journal.num_finished(), 400U);
  for (std::uint32_t task = 0; task < 400; ++task) expect_record(journal, task);
}

TEST(Journal, SaysWhereItCannotBeMade) {
  const TempDir dir;
  EXPECT_TRUE(fails(ErrorKind::kIo, {"absent/journal"},
                    [&] { Journal(dir / "absent/journal", kPlan, false); }));
}

}  // namespace journal_test
}  // namespace ferry::distckpt
