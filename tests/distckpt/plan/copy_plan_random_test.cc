// The planner and the executor against a copy of element by element, on random models in random
// layouts.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "distckpt/elements/cast.h"
#include "distckpt/elements/digest.h"
#include "distckpt/execute/executor.h"
#include "distckpt/execute/memory_io.h"
#include "distckpt/plan/copy_plan.h"
#include "tests/support/expect.h"
#include "tests/support/memory_box_io.h"
#include "tests/support/models/random_model.h"
#include "tests/support/seed_blocks.h"

namespace ferry::distckpt {
namespace copy_plan_random_test {

using support::random_model;
using support::RandomModel;
using support::same_bytes;

class CopyPlanRandom : public support::SeedBlocks {};
INSTANTIATE_TEST_SUITE_P(Blocks, CopyPlanRandom, CopyPlanRandom::all());

// Few seeds, and each takes its time: a block has one.
class CopyPlanRandomLong : public support::SeedBlocksOf<8> {};
INSTANTIATE_TEST_SUITE_P(Blocks, CopyPlanRandomLong, CopyPlanRandomLong::all());

CopyPlan plan_of(const RandomModel& model) {
  return plan_copy(model.tensors, model.source.plan_side(), model.target.plan_side(), model.cast);
}

void expect_copied(const RandomModel& model) {
  for (std::size_t i = 0; i < model.expected.size(); ++i) {
    EXPECT_TRUE(same_bytes(model.expected[i], model.target.memory[i])) << "in storage " << i;
  }
}

// The digest of a tensor whose row-major bytes are these, from the definition.
Digest digest_of(const ModelTensor& tensor, std::span<const std::byte> bytes) {
  std::vector<Digest> blocks;
  for (std::size_t at = 0; at < bytes.size(); at += kDigestBlock) {
    blocks.push_back(
        digest_block(bytes.subspan(at, std::min<std::size_t>(kDigestBlock, bytes.size() - at))));
  }
  return digest_tensor(tensor.dtype, tensor.shape, blocks);
}

void execute(RandomModel& model, int threads) {
  const auto plan = plan_of(model);
  support::MemorySource source(model.source.layout);
  support::MemorySink sink(model.target.layout);
  const auto report = Executor({.threads = threads}).submit(plan, source, &sink).wait();
  expect_copied(model);
  for (std::size_t i = 0; i < model.tensors.size(); ++i) {
    EXPECT_EQ(to_string(report.digests[i]), to_string(digest_of(model.tensors[i], model.bytes[i])))
        << model.tensors[i].name;
  }
  const bool has_padding =
      std::ranges::any_of(plan.discards, [](const Padding& one) { return !one.box.empty(); });
  EXPECT_EQ(report.nonzero_padding.empty(), model.padding_is_zero || !has_padding);
}

TEST_P(CopyPlanRandom, ExecutorAtOneToFourThreadsEqualsTheCopyOfElementByElement) {
  for_each_seed(1, 400, [&](std::uint64_t seed) {
    auto model = random_model(seed);
    ASSERT_NO_THROW(execute(model, static_cast<int>(seed % 4) + 1));
  });
}

TEST_P(CopyPlanRandomLong, TensorsLongerThanOneTaskEqualTheCopyOfElementByElement) {
  for_each_seed(1001, 1008, [&](std::uint64_t seed) {
    auto model = random_model(seed, {.num_tensors = 2, .large = true});
    ASSERT_NO_THROW(execute(model, static_cast<int>(seed % 4) + 1));
  });
}

void carry_out(const CopyOp& op, support::MemorySource& source, support::MemorySink& sink) {
  std::vector<ChecksumPart> none;
  const Region from{.at = op.source, .size = op.box.size, .element_size = size_of(op.source_dtype)};
  const Region into{.at = op.target, .size = op.box.size, .element_size = size_of(op.target_dtype)};
  std::vector<std::byte> bytes(static_cast<std::size_t>(from.num_bytes()));
  source.read(from, bytes, none);
  const auto convert = [&](DType before, DType after, CastRule rule) {
    std::vector<std::byte> converted(static_cast<std::size_t>(op.box.volume() * size_of(after)));
    const auto refused = cast(before, bytes, after, converted, rule);
    EXPECT_FALSE(refused) << "element " << *refused << " of " << to_string(op.box);
    bytes = std::move(converted);
  };
  if (op.transform != Transform::kNone) {
    convert(op.source_dtype, op.dtype,
            op.transform == Transform::kCast ? CastRule::kRound : CastRule::kExact);
  }
  if (op.dtype != op.target_dtype) convert(op.dtype, op.target_dtype, CastRule::kExact);
  sink.write(into, bytes, none);
}

TEST_P(CopyPlanRandom, OpsCarriedOutOneByOneGiveTheSameBytes) {
  int num_ops = 0;
  for_each_seed(1, 200, [&](std::uint64_t seed) {
    auto model = random_model(seed);
    const auto plan = plan_of(model);
    support::MemorySource source(model.source.layout);
    support::MemorySink sink(model.target.layout);
    for (const auto& planned : plan.tensors) {
      for (const auto& op : copy_ops(planned)) {
        carry_out(op, source, sink);
        ++num_ops;
      }
    }
    for (const auto& fill : plan.fills) {
      const Region region{
          .at = fill.at, .size = fill.box.size, .element_size = size_of(fill.dtype)};
      std::vector<ChecksumPart> none;
      sink.write(region, std::vector<std::byte>(static_cast<std::size_t>(region.num_bytes())),
                 none);
    }
    expect_copied(model);
  });
  RecordProperty("ops", num_ops);
}

// Copies as a rank does: the pieces of one storage, straight into its memory, and nothing else.
void execute_pieces(RandomModel& model, int threads) {
  const auto plan = plan_of(model);
  for (StorageId storage = 0; storage < model.target.memory.size(); ++storage) {
    const auto before = model.target.memory;
    const auto part = keep_targets(plan, [&](StorageId id) { return id == storage; });
    support::MemorySource source(model.source.layout);
    MemorySink sink(model.target.layout);
    const auto report =
        Executor({.threads = threads, .on_compared = {}}).submit_pieces(part, source, sink).wait();
    EXPECT_TRUE(report.digests.empty());
    for (std::size_t i = 0; i < before.size(); ++i) {
      EXPECT_TRUE(same_bytes(i == storage ? model.expected[i] : before[i], model.target.memory[i]))
          << "in storage " << i << " after " << storage;
    }
    const bool last = storage + 1 == model.target.memory.size();
    if (last && storage == 0) {
      EXPECT_NO_THROW(sink.finish());
    }
  }
}

TEST_P(CopyPlanRandom, PiecesOfOneStorageAloneEqualTheCopyOfElementByElement) {
  for_each_seed(3001, 3300, [&](std::uint64_t seed) {
    auto model = random_model(seed);
    ASSERT_NO_THROW(execute_pieces(model, static_cast<int>(seed % 4) + 1));
  });
}

TEST_P(CopyPlanRandomLong, PiecesLongerThanOneTaskEqualTheCopyOfElementByElement) {
  for_each_seed(4001, 4008, [&](std::uint64_t seed) {
    auto model = random_model(seed, {.num_tensors = 2, .large = true});
    ASSERT_NO_THROW(execute_pieces(model, static_cast<int>(seed % 4) + 1));
  });
}

TEST_P(CopyPlanRandom, TheCopyBackGivesTheSourceAgain) {
  int carried = 0;
  for_each_seed(2001, 2060, [&](std::uint64_t seed) {
    auto model = random_model(seed);
    if (model.cast == Transform::kCast) return;  // what was rounded does not come back
    ++carried;
    const auto before = model.source.memory;
    const auto there = plan_of(model);
    support::MemorySource source(model.source.layout);
    support::MemorySink sink(model.target.layout);
    Executor({.threads = 2}).submit(there, source, &sink).wait();
    for (auto& bytes : model.source.memory) std::ranges::fill(bytes, support::kUntouched);
    const auto back = plan_copy(model.tensors, model.target.plan_side(), model.source.plan_side());
    support::MemorySource target(model.target.layout);
    support::MemorySink into_source(model.source.layout);
    Executor({.threads = 2}).submit(back, target, &into_source).wait();
    // All but the padding comes back: that is zero now.
    for (std::size_t i = 0; model.padding_is_zero && i < before.size(); ++i) {
      EXPECT_TRUE(same_bytes(before[i], model.source.memory[i])) << "in storage " << i;
    }
  });
  EXPECT_GE(carried, 2);
}

TEST(CopyPlanOfARandomModel, IsAPureFunctionOfLayoutsAndMaps) {
  const auto model = random_model(7);
  const auto describe = [](const CopyPlan& plan) {
    std::string text;
    for (const auto& planned : plan.tensors) {
      for (const auto& op : copy_ops(planned)) {
        text +=
            fmt::format("{} {} {}+{} -> {}+{}\n", planned.tensor.name, to_string(op.box),
                        op.source.storage, op.source.offset, op.target.storage, op.target.offset);
      }
    }
    return text;
  };
  auto shuffled = random_model(7);
  std::ranges::reverse(shuffled.source.map.links);
  std::ranges::reverse(shuffled.target.map.links);
  EXPECT_EQ(describe(plan_of(model)), describe(plan_of(random_model(7))));
  // The pointers differ, the order of the links differs: the plan does not.
  EXPECT_EQ(describe(plan_of(model)), describe(plan_of(shuffled)));
}

}  // namespace copy_plan_random_test
}  // namespace ferry::distckpt
