#include "distckpt/execute/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory_resource>
#include <mutex>
#include <vector>

#include "distckpt/elements/cast.h"
#include "tests/distckpt/execute/executor_pair.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/memory_box_io.h"
#include "tests/support/models/random_model.h"
#include "tests/support/naive_cast.h"
#include "tests/support/random_boxes.h"
#include "tests/support/seed_blocks.h"

namespace ferry::distckpt {
namespace executor_test {

using support::fails;

TEST(Executor, GivesTheSameBytesAndDigestsAtAnyNumberOfThreads) {
  FilePair first;
  const auto expected = run(first, first.plan(), {.threads = 1});
  for (const int threads : {2, 3, 4}) {
    FilePair pair;
    const auto report = run(pair, pair.plan(), {.threads = threads});
    EXPECT_EQ(report.digests, expected.digests);
    EXPECT_TRUE(support::same_bytes(first.target_bytes, pair.target_bytes));
  }
}

TEST(Executor, DigestsTheTensorAndNotItsLayout) {
  FilePair pair;
  const auto copied = run(pair, pair.plan());
  const auto plan = plan_read(pair.tensors, {.layout = &pair.into.layout, .map = &pair.into.map});
  support::MemorySource source(pair.into.layout);
  EXPECT_EQ(Executor({}).submit(plan, source, nullptr).wait().digests, copied.digests);
}

TEST(Executor, RefusesACastThatOverflowsAndNamesTheTensor) {
  FilePair pair(DType::kF32, DType::kF16);
  const float large = 1e6F;
  std::memcpy(pair.source_bytes.data() + 400, &large, sizeof(large));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w: 1000000", "overflows in fp16"},
                    [&] { run(pair, pair.plan(Transform::kCast)); }));
}

TEST(Executor, RefusesToNarrowWhatWouldChange) {
  FilePair pair(DType::kF32, DType::kBF16);
  std::ranges::fill(pair.source_bytes, std::byte{0});
  const float odd = 1.00001F;
  std::memcpy(pair.source_bytes.data(), &odd, sizeof(odd));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w: 1.00001", "would be rounded in bf16"},
                    [&] { run(pair, pair.plan()); }));
}

TEST(Executor, ComparesASecondCopyAndNamesTheElement) {
  FilePair pair;
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
  FilePair pair;
  const auto plan = pair.plan();
  support::MemorySource source(pair.from.layout);
  source.before_read = [](std::int64_t reads) {
    require(reads < 5, ErrorKind::kIo, "the disk broke");
  };
  support::MemorySink sink(pair.into.layout);
  EXPECT_TRUE(fails(ErrorKind::kIo, {"the disk broke", "while copying w"},
                    [&] { Executor({.threads = 2}).submit(plan, source, &sink).wait(); }));
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
  FilePair pair;
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
  FilePair pair;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"one thread needs"},
                    [&] { run(pair, pair.plan(), {.max_memory = 1 << 20}); }));
}

TEST(Executor, CastsBetweenAllFloatingPointDTypes) {
  constexpr std::array kFloats{DType::kF16, DType::kBF16, DType::kF32, DType::kF64};
  for (const auto from : kFloats) {
    for (const auto into : kFloats) {
      FilePair pair(from, into);
      support::Random random(1);
      const auto count = FilePair::kRows * FilePair::kColumns;
      std::vector<std::byte> expected(static_cast<std::size_t>(count * size_of(into)));
      for (std::int64_t i = 0; i < count; ++i) {
        // The values have few enough bits that a half holds them: half of them are exact in bf16 as
        // well.
        const auto value = static_cast<double>(random.between(-2047, 2047)) / 64;
        support::naive_round(value, from, pair.source_bytes.data() + i * size_of(from));
      }
      const auto plan = pair.plan(Transform::kCast);
      run(pair, plan, {.threads = 2});
      // The source is in halves of the columns, the target in halves of the rows.
      for (std::int64_t r = 0; r < FilePair::kRows; ++r) {
        for (std::int64_t c = 0; c < FilePair::kColumns; ++c) {
          const auto half = FilePair::kColumns / 2;
          const auto at = c / half * FilePair::kRows * half + r * half + c % half;
          const auto value =
              support::naive_value(from, pair.source_bytes.data() + at * size_of(from));
          support::naive_round(value, into,
                               expected.data() + (r * FilePair::kColumns + c) * size_of(into));
        }
      }
      ASSERT_TRUE(support::same_bytes(expected, pair.target_bytes))
          << short_name(from) << " to " << short_name(into);
    }
  }
}

// A cast is proved against the digest of the source, cast.
TEST(Executor, DigestsACastAsTheTargetWillBeRead) {
  FilePair pair(DType::kF32, DType::kBF16);
  const auto copied = run(pair, pair.plan(Transform::kCast));
  const auto plan = plan_read(pair.tensors, {.layout = &pair.into.layout, .map = &pair.into.map});
  support::MemorySource source(pair.into.layout);
  EXPECT_EQ(Executor({}).submit(plan, source, nullptr).wait().digests, copied.digests);
}

class ExecutorOnRandomModels : public support::SeedBlocks {};
INSTANTIATE_TEST_SUITE_P(Blocks, ExecutorOnRandomModels, ExecutorOnRandomModels::all());

TEST_P(ExecutorOnRandomModels, GivesTheSameDigestsInBothLayouts) {
  for_each_seed(1, 20, [&](std::uint64_t seed) {
    auto model = support::random_model(seed);
    const auto plan =
        plan_copy(model.tensors, model.source.plan_side(), model.target.plan_side(), model.cast);
    support::MemorySource source(model.source.layout);
    support::MemorySink sink(model.target.layout);
    const auto copied = Executor({.threads = 2}).submit(plan, source, &sink).wait();
    const auto back = plan_read(model.tensors, model.target.plan_side());
    support::MemorySource target(model.target.layout);
    const auto read = Executor({.threads = 3}).submit(back, target, nullptr).wait();
    ASSERT_EQ(read.digests, copied.digests);
    EXPECT_TRUE(read.nonzero_padding.empty());  // what was filled is zero
  });
}

// A tensor that is stored twice: the second copy is fp32, so that it is cast before it is compared.
struct Tied {
  static constexpr std::int64_t kCount = 3 << 20;  // more than two tasks

  Tied() : embed(2 * kCount), head(4 * kCount) {
    support::Random random(2);
    for (std::size_t i = 0; i < kCount; ++i) set(i, static_cast<double>(random.between(-99, 99)));
    const auto first =
        layout.add_storage(MemoryStorage{.data = embed.data(), .size = std::ssize(embed)});
    const auto second =
        layout.add_storage(MemoryStorage{.data = head.data(), .size = std::ssize(head)});
    const auto whole = Box::whole({kCount});
    layout.add_tensor({.name = "embed",
                       .shape = {kCount},
                       .shards = {packed_shard(whole, DType::kBF16, first, 0)}});
    layout.add_tensor({.name = "head",
                       .dtype = DType::kF32,
                       .shape = {kCount},
                       .shards = {packed_shard(whole, DType::kF32, second, 0)}});
    map.links.push_back({.model_box = whole, .stored_box = whole});
    map.links.push_back({.model_box = whole, .stored = 1, .stored_box = whole, .copy = 1});
    plan = plan_read({{.name = "embed", .shape = {kCount}}}, {.layout = &layout, .map = &map});
  }
  Tied(const Tied&) = delete;
  Tied& operator=(const Tied&) = delete;

  void set(std::size_t i, double value) {
    support::naive_round(value, DType::kBF16, &embed[2 * i]);
    support::naive_round(value, DType::kF32, &head[4 * i]);
  }

  std::vector<std::byte> embed;
  std::vector<std::byte> head;
  Layout layout{};
  TensorMap map{};
  CopyPlan plan{};
};

TEST(Executor, ComparesASecondCopyOfAnotherDType) {
  Tied tied;
  support::MemorySource source(tied.layout);
  EXPECT_NO_THROW(Executor({.threads = 2}).submit(tied.plan, source, nullptr).wait());
  EXPECT_EQ(source.bytes_read(), 6 * Tied::kCount);
  support::naive_round(123, DType::kF32, &tied.head[4 * 2'222'222]);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"embed", "element 2222222"},
                    [&] { Executor({}).submit(tied.plan, source, nullptr).wait(); }));
}

// A weight in one place, and less one, rounded to bf16, in another.
struct LessOne {
  explicit LessOne(const std::vector<double>& weights)
      : count(std::ssize(weights)), weight(2 * weights.size()), stored(2 * weights.size()) {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      support::naive_round(weights[i], DType::kBF16, &weight[2 * i]);
      support::naive_round(element_value(DType::kBF16, &weight[2 * i]) - 1, DType::kBF16,
                           &stored[2 * i]);
    }
  }

  // The sides that hold it as it is, less one, or both; the first is read.
  PlanSide side(std::vector<std::pair<std::vector<std::byte>*, int>> copies) {
    layouts.emplace_back();
    maps.emplace_back();
    for (std::size_t i = 0; i < copies.size(); ++i) {
      auto& bytes = *copies[i].first;
      const auto storage = layouts.back().add_storage(
          MemoryStorage{.data = bytes.data(), .size = std::ssize(bytes)});
      layouts.back().add_tensor(
          {.name = fmt::format("copy {}", i),
           .shape = {count},
           .shards = {packed_shard(Box::whole({count}), DType::kBF16, storage, 0)}});
      maps.back().links.push_back({.model_box = Box::whole({count}),
                                   .stored = static_cast<std::uint32_t>(i),
                                   .stored_box = Box::whole({count}),
                                   .copy = static_cast<int>(i),
                                   .less = copies[i].second});
    }
    return {.layout = &layouts.back(), .map = &maps.back()};
  }

  void copy(const PlanSide& from, const PlanSide& to) {
    support::MemorySource source(*from.layout);
    support::MemorySink sink(*to.layout);
    Executor({}).submit(plan_copy(tensors(), from, to), source, &sink).wait();
  }
  std::vector<ModelTensor> tensors() const { return {{.name = "norm", .shape = {count}}}; }

  std::int64_t count;
  std::vector<std::byte> weight;
  std::vector<std::byte> stored;
  std::deque<Layout> layouts{};
  std::deque<TensorMap> maps{};
};

TEST(Executor, TakesOneFromEachElementAndRounds) {
  LessOne norm({0.3, 0.126, 1.0, 1.75, 0.0078125});
  std::vector<std::byte> written(norm.stored.size());
  norm.copy(norm.side({{&norm.weight, 0}}), norm.side({{&written, 1}}));
  EXPECT_EQ(written, norm.stored);
}

TEST(Executor, CopiesWhatBothSidesHoldLessOneAsItIs) {
  LessOne norm({1, 1, 1});
  support::naive_round(1e-6, DType::kBF16, norm.stored.data());  // nothing of it is left beside 1
  std::vector<std::byte> written(norm.stored.size());
  norm.copy(norm.side({{&norm.stored, 1}}), norm.side({{&written, 1}}));
  EXPECT_EQ(written, norm.stored);
}

TEST(Executor, BringsTheOriginalBackAndHoldsWhatWasRoundedAgainstIt) {
  LessOne norm({0.3, 0.126, 0.1953125, 1.75});
  std::vector<std::byte> written(norm.weight.size());
  const auto both = norm.side({{&norm.weight, 0}, {&norm.stored, 1}});
  norm.copy(both, norm.side({{&written, 0}}));
  EXPECT_EQ(written, norm.weight);
  support::naive_round(-0.5, DType::kBF16, &norm.stored[4]);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"norm", "element 2"}, [&] {
    norm.copy(both, norm.side({{&written, 0}}));
  }));
}

TEST(Executor, GivesEveryStretchOfACopyToWhoeverAsks) {
  Tied tied;
  std::vector<std::int64_t> wanted{5, 1'500'000, Tied::kCount - 1};
  for (const auto i : wanted) {
    support::naive_round(123, DType::kF32, &tied.head[static_cast<std::size_t>(4 * i)]);
  }
  std::vector<std::int64_t> found;
  support::MemorySource source(tied.layout);
  ExecutorOptions options{.threads = 4};
  std::mutex mutex;
  std::int64_t elements = 0;
  options.on_compared = [&](const Comparison& one) {
    const std::lock_guard lock(mutex);
    elements += std::ssize(one.expected) / 2;
    ASSERT_EQ(one.element * 2 % kDigestBlock, 0);
    ASSERT_EQ(one.equal, std::ranges::equal(one.expected, one.found));
    ASSERT_EQ(one.tensor, 0U);
    ASSERT_EQ(one.replica, 0U);
    ASSERT_EQ(one.expected.size(), one.found.size());
    for (std::size_t at = 0; at < one.expected.size(); at += 2) {
      if (!std::ranges::equal(one.expected.subspan(at, 2), one.found.subspan(at, 2))) {
        found.push_back(one.element + static_cast<std::int64_t>(at / 2));
      }
    }
  };
  EXPECT_NO_THROW(Executor(options).submit(tied.plan, source, nullptr).wait());
  std::ranges::sort(found);
  EXPECT_EQ(found, wanted);
  EXPECT_EQ(elements, Tied::kCount);
}

TEST(Executor, ReportsPaddingThatIsNotZero) {
  const Shape shape{6, 4};
  std::vector<std::byte> bytes(24 * 2);
  Layout layout;
  const auto memory =
      layout.add_storage(MemoryStorage{.data = bytes.data(), .size = std::ssize(bytes)});
  layout.add_tensor({.name = "word_embeddings",
                     .shape = shape,
                     .shards = {packed_shard(Box::whole(shape), DType::kBF16, memory, 0)}});
  const Box rows{.offset = {0, 0}, .size = {5, 4}};
  const TensorMap map{.links = {{.model_box = rows, .stored_box = rows}},
                      .padding = {{.stored = 0, .box = {.offset = {5, 0}, .size = {1, 4}}}}};
  const auto plan =
      plan_read({{.name = "embed", .shape = {5, 4}}}, {.layout = &layout, .map = &map});
  support::MemorySource source(layout);
  EXPECT_TRUE(Executor({}).submit(plan, source, nullptr).wait().nonzero_padding.empty());
  bytes[2 * 22] = std::byte{1};
  const auto report = Executor({}).submit(plan, source, nullptr).wait();
  ASSERT_EQ(report.nonzero_padding.size(), 1U);
  EXPECT_EQ(report.nonzero_padding[0].tensor, "word_embeddings");
  EXPECT_EQ(to_string(report.nonzero_padding[0].box), "[5:6, 0:4]");
}

TEST(Executor, FillsPaddingWithOnesAndReportsOtherValues) {
  const Shape shape{4};
  std::vector<std::byte> bytes(shape.product() * 2);
  Layout layout;
  const auto memory =
      layout.add_storage(MemoryStorage{.data = bytes.data(), .size = std::ssize(bytes)});
  layout.add_tensor({.name = "k_layernorm",
                     .shape = shape,
                     .shards = {packed_shard(Box::whole(shape), DType::kBF16, memory, 0)}});
  const TensorMap map{.padding = {{.stored = 0, .box = Box::whole(shape), .ones = true}}};
  const PlanSide side{.layout = &layout, .map = &map};
  support::MemorySource source(layout);
  support::MemorySink sink(layout);
  Executor({}).submit(plan_copy({}, side, side), source, &sink).wait();
  for (std::size_t i = 0; i < bytes.size(); i += 2)
    EXPECT_EQ(std::pair(bytes[i], bytes[i + 1]), std::pair(std::byte{0x80}, std::byte{0x3F}));
  const auto read = plan_read({}, side);
  EXPECT_TRUE(Executor({}).submit(read, source, nullptr).wait().nonzero_padding.empty());
  bytes[4] = std::byte{0x81};
  const auto report = Executor({}).submit(read, source, nullptr).wait();
  ASSERT_EQ(report.nonzero_padding.size(), 1U);
  EXPECT_EQ(report.nonzero_padding[0].tensor, "k_layernorm");
}

TEST(Executor, ReadsAndWritesEveryByteOnce) {
  FilePair pair;
  const auto plan = pair.plan();
  support::MemorySource source(pair.from.layout);
  support::MemorySink sink(pair.into.layout);
  auto execution = Executor({.threads = 3}).submit(plan, source, &sink);
  const auto report = execution.wait();
  EXPECT_EQ(report.bytes, plan.num_bytes());
  EXPECT_EQ(execution.bytes_done(), plan.num_bytes());
  EXPECT_EQ(source.bytes_read(), plan.num_bytes());
  EXPECT_EQ(sink.bytes_written(), plan.num_bytes());
}

TEST(Executor, OfAnEmptyPlanIsDoneAtOnce) {
  const CopyPlan plan;
  const Layout layout;
  support::MemorySource source(layout);
  const auto report = Executor({.threads = 2}).submit(plan, source, nullptr).wait();
  EXPECT_EQ(report.bytes, 0);
  EXPECT_TRUE(report.digests.empty());
}

TEST(StagingBudget, TakesFewerThreadsRatherThanMoreMemory) {
  FilePair pair;
  const auto plan = pair.plan();
  const auto one = staging_budget(plan, {.threads = 1}).bytes;
  EXPECT_EQ(staging_budget(plan, {.threads = 4, .max_memory = 4 * one}).threads, 4);
  EXPECT_EQ(staging_budget(plan, {.threads = 4, .max_memory = 4 * one - 1}).threads, 3);
  EXPECT_EQ(staging_budget(plan, {.threads = 4, .max_memory = one}).bytes, one);
  EXPECT_EQ(staging_budget(plan, {.threads = 4, .max_memory = 4 * one, .thread_memory = one}),
            (StagingBudget{.threads = 2, .bytes = 4 * one}));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"memory", "one thread needs"},
                    [&] { staging_budget(plan, {.threads = 4, .max_memory = one - 1}); }));
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"memory"}, [&] { staging_budget(plan, {.max_memory = 0}); }));
}

}  // namespace executor_test
}  // namespace ferry::distckpt
