// Copies that end early: cancelled, forgotten, by an error; and those that are resumed.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <latch>
#include <memory_resource>
#include <new>
#include <thread>
#include <vector>

#include "tests/distckpt/execute/executor_pair.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/memory_box_io.h"
#include "tests/support/models/random_model.h"
#include "tests/support/random_boxes.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace executor_interrupted_test {

using executor_test::FilePair;
using executor_test::run;
using support::fails;

TEST(InterruptedExecutor, StopsWhenCancelled) {
  FilePair pair;
  const auto plan = pair.plan();
  support::MemorySource source(pair.from.layout);
  support::MemorySink sink(pair.into.layout);
  auto execution = Executor({.threads = 1}).submit(plan, source, &sink);
  execution.cancel();
  EXPECT_TRUE(fails(ErrorKind::kCancelled, {"interrupted"}, [&] { execution.wait(); }));
}

TEST(InterruptedExecutor, ResumesFromTheJournalWithTheSameBytesAndFewerReads) {
  const support::TempDir dir;
  const Digest fingerprint = digest_block({});
  FilePair whole;
  const auto expected = run(whole, whole.plan());
  FilePair pair;
  const auto plan = pair.plan();
  support::MemorySink sink(pair.into.layout);
  {
    Journal journal(dir / "journal", fingerprint, false);
    support::MemorySource source(pair.from.layout);
    source.before_read = [](std::int64_t reads) {
      require(reads < 9, ErrorKind::kIo, "pulled the plug");
    };
    EXPECT_THROW(Executor({.threads = 1, .journal = &journal}).submit(plan, source, &sink).wait(),
                 Error);
  }
  Journal journal(dir / "journal", fingerprint, true);
  EXPECT_GT(journal.num_finished(), 0U);
  support::MemorySource source(pair.from.layout);
  const auto report =
      Executor({.threads = 2, .journal = &journal}).submit(plan, source, &sink).wait();
  EXPECT_EQ(report.digests, expected.digests);
  EXPECT_GT(report.resumed_bytes, 0);
  EXPECT_EQ(source.bytes_read() + report.resumed_bytes, report.bytes);
  EXPECT_TRUE(support::same_bytes(whole.target_bytes, pair.target_bytes));
}

TEST(InterruptedExecutor, CancelsInTheMiddle) {
  for (const int threads : {1, 4}) {
    FilePair pair;
    const auto plan = pair.plan();
    support::MemorySource source(pair.from.layout);
    support::MemorySink sink(pair.into.layout);
    std::latch started(1);
    source.before_read = [&](std::int64_t reads) {
      if (reads == 0) started.count_down();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    auto execution = Executor({.threads = threads}).submit(plan, source, &sink);
    started.wait();
    execution.cancel();
    EXPECT_TRUE(fails(ErrorKind::kCancelled, {"interrupted"}, [&] { execution.wait(); }));
    EXPECT_LT(execution.bytes_done(), execution.bytes_total());
  }
}

TEST(InterruptedExecutor, WaitsAndStopsWhenItIsForgotten) {
  FilePair pair;
  const auto plan = pair.plan();
  support::MemorySink sink(pair.into.layout);
  std::atomic<bool> gone = false;
  {
    support::MemorySource source(pair.from.layout);
    source.before_read = [&](std::int64_t) {
      EXPECT_FALSE(gone);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    const auto execution = Executor({.threads = 4}).submit(plan, source, &sink);
  }
  gone = true;
}

TEST(InterruptedExecutor, SurfacesWhateverASourceThrowsAndJoins) {
  for (const int threads : {1, 4}) {
    FilePair pair;
    const auto plan = pair.plan();
    support::MemorySource source(pair.from.layout);
    support::MemorySink sink(pair.into.layout);
    source.before_read = [](std::int64_t reads) {
      if (reads == 3) throw std::bad_alloc();
    };
    auto execution = Executor({.threads = threads}).submit(plan, source, &sink);
    while (!execution.wait_for(std::chrono::milliseconds(1))) {
    }
    EXPECT_THROW(execution.wait(), std::bad_alloc);
  }
}

TEST(InterruptedExecutor, SurfacesAnErrorOfTheSink) {
  class FullSink : public BoxSink {
   public:
    void write(const Region&, std::span<const std::byte>, std::vector<ChecksumPart>&) override {
      fail(ErrorKind::kIo, "no space left");
    }
  };
  FilePair pair;
  const auto plan = pair.plan();
  support::MemorySource source(pair.from.layout);
  FullSink sink;
  EXPECT_TRUE(fails(ErrorKind::kIo, {"no space left", "while copying w"},
                    [&] { Executor({.threads = 2}).submit(plan, source, &sink).wait(); }));
}

TEST(InterruptedExecutor, SurfacesStagingMemoryThatIsRefused) {
  FilePair pair;
  EXPECT_THROW(run(pair, pair.plan(), {.staging = std::pmr::null_memory_resource()}),
               std::bad_alloc);
}

// Interrupted at any read, by any number of threads, and with the log's last record torn.
TEST(InterruptedExecutor, ResumesWhereverItWasInterrupted) {
  const support::TempDir dir;
  support::Random random(3);
  for (int i = 0; i < 12; ++i) {
    SCOPED_TRACE(i);
    auto model = support::random_model(500 + static_cast<std::uint64_t>(i),
                                       {.num_tensors = 3, .large = true});
    const auto plan =
        plan_copy(model.tensors, model.source.plan_side(), model.target.plan_side(), model.cast);
    support::MemorySink sink(model.target.layout);
    support::MemorySource unbroken(model.source.layout);
    const auto expected = Executor({}).submit(plan, unbroken, nullptr).wait();
    {
      Journal journal(dir / "journal", digest_block({}), false);
      support::MemorySource source(model.source.layout);
      const auto last = random.between(0, unbroken.num_reads() - 1);
      source.before_read = [last](std::int64_t reads) {
        require(reads < last, ErrorKind::kIo, "pulled the plug");
      };
      auto execution =
          Executor({.threads = i % 3 + 1, .journal = &journal}).submit(plan, source, &sink);
      EXPECT_TRUE(fails(ErrorKind::kIo, {"pulled the plug"}, [&] { execution.wait(); }));
    }
    const auto log = static_cast<std::int64_t>(std::filesystem::file_size(dir / "journal"));
    support::cut(dir / "journal", std::max<std::int64_t>(0, log - random.between(0, 20)));
    Journal journal(dir / "journal", digest_block({}), true);
    support::MemorySource source(model.source.layout);
    const auto report =
        Executor({.threads = 3, .journal = &journal}).submit(plan, source, &sink).wait();
    EXPECT_EQ(report.digests, expected.digests);
    EXPECT_LE(source.num_reads(), unbroken.num_reads());
    EXPECT_EQ(report.nonzero_padding.size(), expected.nonzero_padding.size());
    for (std::size_t s = 0; s < model.expected.size(); ++s) {
      ASSERT_TRUE(support::same_bytes(model.expected[s], model.target.memory[s]));
    }
  }
}

TEST(InterruptedExecutor, OfAFinishedJournalReadsNothingAgain) {
  const support::TempDir dir;
  FilePair pair;
  const auto plan = pair.plan();
  support::MemorySink sink(pair.into.layout);
  ExecuteReport first;
  {
    Journal journal(dir / "journal", digest_block({}), false);
    first = run(pair, plan, {.threads = 2, .journal = &journal});
  }
  Journal journal(dir / "journal", digest_block({}), true);
  support::MemorySource source(pair.from.layout);
  const auto report = Executor({.journal = &journal}).submit(plan, source, &sink).wait();
  EXPECT_EQ(report.digests, first.digests);
  EXPECT_EQ(report.resumed_bytes, report.bytes);
  EXPECT_EQ(source.num_reads(), 0);
}

}  // namespace executor_interrupted_test
}  // namespace ferry::distckpt
