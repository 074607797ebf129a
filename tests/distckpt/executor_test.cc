#include "distckpt/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <memory_resource>
#include <vector>

#include "distckpt/cast.h"
#include "tests/support/expect.h"
#include "tests/support/memory_box_io.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace {

using support::fails;

// One tensor in memory, in two halves of its columns; copied to one in halves of its rows.
struct Pair {
  static constexpr std::int64_t kRows = 4096;
  static constexpr std::int64_t kColumns = 1024;

  explicit Pair(DType from_dtype = DType::kF32, DType into_dtype = DType::kF32)
      : tensors{{.name = "w", .dtype = into_dtype, .shape = {kRows, kColumns}}} {
    from = side(from_dtype, 1, source_bytes);
    into = side(into_dtype, 0, target_bytes);
    auto* values = reinterpret_cast<std::uint16_t*>(source_bytes.data());
    for (std::size_t i = 0; i < source_bytes.size() / 2; ++i)
      values[i] = static_cast<std::uint16_t>(i * 2654435761U >> 7 & 0x3FFF);
  }

  struct Side {
    Layout layout{};
    TensorMap map{};
  };

  Side side(DType dtype, int dim, std::vector<std::byte>& bytes) {
    Side side;
    const Shape shape{kRows, kColumns};
    bytes.resize(static_cast<std::size_t>(shape.product() * size_of(dtype)));
    const auto memory = side.layout.add_storage(
        MemoryStorage{.data = bytes.data(), .size = static_cast<std::int64_t>(bytes.size())});
    auto first = Box::whole(shape);
    first.size[dim] /= 2;
    auto second = first;
    second.offset[dim] = first.size[dim];
    const auto half = shape.product() / 2 * size_of(dtype);
    side.layout.add_tensor({.name = "w",
                            .dtype = dtype,
                            .shape = shape,
                            .shards = {packed_shard(first, dtype, memory, 0),
                                       packed_shard(second, dtype, memory, half)}});
    side.map.links.push_back({.model_box = Box::whole(shape), .stored_box = Box::whole(shape)});
    return side;
  }

  CopyPlan plan(Transform cast = Transform::kCastExact) const {
    return plan_copy(tensors, {.layout = &from.layout, .map = &from.map},
                     {.layout = &into.layout, .map = &into.map}, cast);
  }

  std::vector<ModelTensor> tensors;
  std::vector<std::byte> source_bytes;
  std::vector<std::byte> target_bytes;
  Side from;
  Side into;
};

ExecuteReport run(Pair& pair, const CopyPlan& plan, ExecutorOptions options = {}) {
  support::MemorySource source(pair.from.layout);
  support::MemorySink sink(pair.into.layout);
  return Executor(std::move(options)).submit(plan, source, &sink).wait();
}

TEST(Executor, GivesTheSameBytesAndDigestsAtAnyNumberOfThreads) {
  Pair first;
  const auto expected = run(first, first.plan(), {.threads = 1});
  for (const int threads : {2, 3, 4}) {
    Pair pair;
    const auto report = run(pair, pair.plan(), {.threads = threads});
    EXPECT_EQ(report.digests, expected.digests);
    EXPECT_TRUE(support::same_bytes(first.target_bytes, pair.target_bytes));
  }
}

TEST(Executor, DigestsTheTensorAndNotItsLayout) {
  Pair pair;
  const auto copied = run(pair, pair.plan());
  const auto plan = plan_read(pair.tensors, {.layout = &pair.into.layout, .map = &pair.into.map});
  support::MemorySource source(pair.into.layout);
  EXPECT_EQ(Executor({}).submit(plan, source, nullptr).wait().digests, copied.digests);
}

TEST(Executor, RefusesACastThatOverflowsAndNamesTheTensor) {
  Pair pair(DType::kF32, DType::kF16);
  const float large = 1e6F;
  std::memcpy(pair.source_bytes.data() + 400, &large, sizeof(large));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w: 1000000", "overflows in fp16"},
                    [&] { run(pair, pair.plan(Transform::kCast)); }));
}

TEST(Executor, RefusesToNarrowWhatWouldChange) {
  Pair pair(DType::kF32, DType::kBF16);
  std::ranges::fill(pair.source_bytes, std::byte{0});
  const float odd = 1.00001F;
  std::memcpy(pair.source_bytes.data(), &odd, sizeof(odd));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w: 1.00001", "would be rounded in bf16"},
                    [&] { run(pair, pair.plan()); }));
}

TEST(Executor, ComparesASecondCopyAndNamesTheElement) {
  Pair pair;
  run(pair, pair.plan());
  pair.target_bytes[4 * 5000] ^= std::byte{1};
  // The target's tensor becomes a second copy of the source's.
  auto plan = plan_read(pair.tensors, {.layout = &pair.from.layout, .map = &pair.from.map});
  Layout both;
  both.add_storage(pair.from.layout.storages()[0]);
  both.add_storage(pair.into.layout.storages()[0]);
  auto copy = plan_read(pair.tensors, {.layout = &pair.into.layout, .map = &pair.into.map})
                  .tensors[0]
                  .source;
  for (auto& piece : copy) piece.at.storage = 1;
  plan.tensors[0].replicas.push_back(copy);
  support::MemorySource source(both);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "element 5000"},
                    [&] { Executor({}).submit(plan, source, nullptr).wait(); }));
}

TEST(Executor, SurfacesAnErrorOfTheSource) {
  Pair pair;
  const auto plan = pair.plan();
  support::MemorySource source(pair.from.layout);
  source.before_read = [](std::int64_t reads) {
    require(reads < 5, ErrorKind::kIo, "the disk broke");
  };
  support::MemorySink sink(pair.into.layout);
  EXPECT_TRUE(fails(ErrorKind::kIo, {"the disk broke", "while copying w"},
                    [&] { Executor({.threads = 2}).submit(plan, source, &sink).wait(); }));
}

TEST(Executor, StopsWhenCancelled) {
  Pair pair;
  const auto plan = pair.plan();
  support::MemorySource source(pair.from.layout);
  support::MemorySink sink(pair.into.layout);
  auto execution = Executor({.threads = 1}).submit(plan, source, &sink);
  execution.cancel();
  EXPECT_TRUE(fails(ErrorKind::kCancelled, {"interrupted"}, [&] { execution.wait(); }));
}

class CountingResource : public std::pmr::memory_resource {
 public:
  std::atomic<std::int64_t> now = 0;
  std::atomic<std::int64_t> peak = 0;

 private:
  void* do_allocate(std::size_t size, std::size_t alignment) override {
    const auto total = now += static_cast<std::int64_t>(size);
    for (auto seen = peak.load(); seen < total && !peak.compare_exchange_weak(seen, total);) {
    }
    return std::pmr::new_delete_resource()->allocate(size, alignment);
  }
  void do_deallocate(void* memory, std::size_t size, std::size_t alignment) override {
    now -= static_cast<std::int64_t>(size);
    std::pmr::new_delete_resource()->deallocate(memory, size, alignment);
  }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

TEST(Executor, StagesInTheCallersMemoryWithinTheBudget) {
  Pair pair;
  CountingResource resource;
  const ExecutorOptions options{.threads = 3, .max_memory = 16 << 20, .staging = &resource};
  const auto plan = pair.plan();
  run(pair, plan, options);
  EXPECT_GT(resource.peak, 0);
  EXPECT_LE(resource.peak, staging_budget(plan, options).bytes);
  EXPECT_LE(resource.peak, options.max_memory);
  EXPECT_EQ(resource.now, 0);
}

TEST(Executor, RefusesABudgetThatIsTooSmallForOneThread) {
  Pair pair;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"one thread needs"},
                    [&] { run(pair, pair.plan(), {.max_memory = 1 << 20}); }));
}

TEST(Executor, ResumesFromTheJournalWithTheSameBytesAndFewerReads) {
  const support::TempDir dir;
  const Digest fingerprint = digest_block({});
  Pair whole;
  const auto expected = run(whole, whole.plan());
  Pair pair;
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

TEST(Journal, IgnoresATornTailAndRefusesAnotherFingerprint) {
  const support::TempDir dir;
  const Digest fingerprint = digest_block({});
  {
    Journal journal(dir / "journal", fingerprint, false);
    journal.append({.task = 3, .blocks = {fingerprint}});
    journal.append({.task = 4, .blocks = {fingerprint}});
  }
  std::filesystem::resize_file(dir / "journal", std::filesystem::file_size(dir / "journal") - 5);
  {
    const Journal journal(dir / "journal", fingerprint, true);
    EXPECT_EQ(journal.num_finished(), 1U);
    ASSERT_NE(journal.finished(3), nullptr);
    EXPECT_EQ(journal.finished(3)->blocks.at(0), fingerprint);
  }
  const std::array other{std::byte{1}};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"another source or other options"},
                    [&] { Journal(dir / "journal", digest_block(other), true); }));
}

}  // namespace
}  // namespace ferry::distckpt
