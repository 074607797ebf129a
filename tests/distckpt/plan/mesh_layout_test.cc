#include "distckpt/plan/mesh_layout.h"

#include <gtest/gtest.h>

#include <array>
#include <variant>

#include "distckpt/execute/executor.h"
#include "distckpt/execute/memory_io.h"
#include "tests/support/expect.h"
#include "tests/support/fake_ranks.h"
#include "tests/support/memory_box_io.h"

namespace ferry::distckpt {
namespace mesh_layout_test {

using support::fails;

ShardedTensor rows(std::int64_t from, std::int64_t count, std::vector<int> replica_id = {}) {
  return {.key = "w",
          .local_shape = {count, 4},
          .global_shape = {8, 4},
          .global_offset = {from, 0},
          .replica_id = std::move(replica_id)};
}

// Ranks that hold these, seen from one that has no memory of its own to show.
MeshLayout seen(std::vector<std::vector<ShardedTensor>> ranks) {
  ranks.emplace_back();
  const auto last = static_cast<int>(ranks.size()) - 1;
  return make_mesh_layout(std::move(ranks), last, {});
}

TEST(MeshLayout, HoldsEachBoxOnceAtTheMainReplica) {
  const auto mesh = seen({{rows(4, 4, {0, 1})}, {rows(0, 4), rows(4, 4)}, {rows(0, 4, {0, 2})}});
  const auto& tensor = mesh.layout.tensor(0);
  ASSERT_EQ(tensor.shards.size(), 2U);
  for (const auto& shard : tensor.shards) EXPECT_EQ(shard.at.storage, 1U);
  EXPECT_EQ(tensor.shards[0].at.offset, 0);
  EXPECT_EQ(tensor.shards[1].at.offset, 4 * 4 * 2);
  EXPECT_EQ(describe(mesh.layout.storages()[1]), "memory of rank 1");
  EXPECT_EQ(std::get<RankStorage>(mesh.layout.storages()[1]).size, 8 * 4 * 2);
  EXPECT_NO_THROW(check_layout(mesh.layout));
}

TEST(MeshLayout, PlacesABoxInTheRanksOwnMemoryAlsoIfItIsNoMainReplica) {
  std::array<std::byte, 64> memory{};
  const auto mesh =
      make_mesh_layout({{rows(0, 4), rows(4, 4)}, {}}, 1,
                       {{.tensor = rows(4, 4, {1}), .data = memory.data(), .strides = {1, 4}}});
  const auto& shards = mesh.layout.tensor(0).shards;
  EXPECT_EQ(shards[0].at.storage, 0U);
  EXPECT_FALSE(mesh.is_mine(shards[0].at.storage));
  EXPECT_TRUE(mesh.is_mine(shards[1].at.storage));
  EXPECT_EQ(shards[1].at.strides, (Dims{2, 8}));
  const auto& mine = std::get<MemoryStorage>(mesh.layout.storages()[shards[1].at.storage]);
  EXPECT_EQ(mine.data, memory.data());
  EXPECT_EQ(mine.size, 32);
}

TEST(MeshLayout, PrependsAxesOfSizeOne) {
  std::array<std::byte, 64> memory{};
  const ShardedTensor stacked{.key = "w",
                              .local_shape = {4, 2},
                              .global_shape = {1, 4, 2},
                              .global_offset = {0, 0, 0},
                              .prepend_axis_num = 1};
  const auto mesh = make_mesh_layout({{}}, 0, {{.tensor = stacked, .data = memory.data()}});
  EXPECT_EQ(mesh.layout.tensor(0).shards[0].at.strides, (Dims{0, 4, 2}));
}

TEST(MeshLayout, NamesWhatNobodyHolds) {
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "[4:6, 0:4]", "held 0 times"}, [] {
    seen({{rows(0, 4)}, {rows(6, 2)}});
  }));
}

TEST(MeshLayout, NamesBoxesThatOverlap) {
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "[3:4, 0:4]", "held 2 times"}, [] {
    seen({{rows(0, 4)}, {rows(3, 5)}});
  }));
}

TEST(MeshLayout, NamesRanksThatBothHoldTheMainReplica) {
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w [0:8, 0:4]", "ranks 0 and 2", "main replica"}, [] {
    seen({{rows(0, 8)}, {rows(0, 8, {1})}, {rows(0, 8)}});
  }));
}

TEST(MeshLayout, NamesABoxWithoutAMainReplica) {
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"w [4:8, 0:4]", "ranks 1 and 2", "none as the main replica"}, [] {
        seen({{rows(0, 4)}, {rows(4, 4, {1})}, {rows(4, 4, {2})}});
      }));
}

TEST(MeshLayout, RefusesAReplicaThatIsAnotherBox) {
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "[2:4, 0:4]"}, [] {
    seen({{rows(0, 8)}, {rows(2, 2, {1})}});
  }));
}

TEST(MeshLayout, RefusesOneRankThatHoldsABoxTwice) {
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w [0:8, 0:4]", "rank 0 holds it twice"}, [] {
    seen({{rows(0, 8), rows(0, 8, {1})}});
  }));
}

TEST(MeshLayout, NamesRanksThatDisagreeAboutATensor) {
  auto other = rows(4, 4);
  other.dtype = DType::kF32;
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "fp32", "rank 1", "bf16", "rank 0"}, [&] {
    seen({{rows(0, 4)}, {other}});
  }));
  other = rows(4, 4);
  other.global_shape = {9, 4};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "[9, 4]", "[8, 4]"}, [&] {
    seen({{rows(0, 4)}, {other}});
  }));
}

TEST(MeshLayout, RefusesMemoryThatCannotBeAShard) {
  std::array<std::byte, 64> memory{};
  const auto with = [&](std::byte* data, const Dims& strides) {
    make_mesh_layout({{}}, 0, {{.tensor = rows(0, 8), .data = data, .strides = strides}});
  };
  EXPECT_NO_THROW(with(memory.data(), {}));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"w", "no memory"}, [&] { with(nullptr, {}); }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"w", "two elements"}, [&] {
    with(memory.data(), {0, 1});
  }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"w", "two elements"}, [&] {
    with(memory.data(), {3, 1});
  }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"w", "two elements"}, [&] {
    with(memory.data(), {-4, 1});
  }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"w", "strides"}, [&] { with(memory.data(), {1}); }));
}

TEST(MeshLayout, IsGatheredByTheRanksOfAGroup) {
  std::array<std::array<std::byte, 32>, 2> memory{};
  support::run_as_ranks(2, [&](const RankGroup& group) {
    const auto rank = static_cast<std::size_t>(group.rank);
    const auto mesh = gather_mesh_layout(
        group, {{.tensor = rows(4 * group.rank, 4), .data = memory[rank].data()}});
    EXPECT_EQ(mesh.rank, group.rank);
    const auto& shards = mesh.layout.tensor(0).shards;
    ASSERT_EQ(shards.size(), 2U);
    EXPECT_TRUE(mesh.is_mine(shards[rank].at.storage));
    EXPECT_EQ(shards[1 - rank].at.storage, 1 - rank);
  });
}

TEST(RunTogether, FailsOnAllRanksWhereItFailsOnOne) {
  support::run_as_ranks(3, [](const RankGroup& group) {
    const auto body = [&] { require(group.rank != 1, ErrorKind::kIo, "no space left"); };
    if (group.rank == 1) {
      EXPECT_TRUE(fails(ErrorKind::kIo, {"no space left"}, [&] { run_together(group, body); }));
    } else {
      EXPECT_TRUE(fails(ErrorKind::kCancelled, {"rank 1 failed: no space left"},
                        [&] { run_together(group, body); }));
    }
    EXPECT_NO_THROW(run_together(group, [] {}));
  });
}

TEST(MeshLayout, FailsOnAllRanksWhereTheMemoryOfOneIsWrong) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"w", "no memory"}, [] {
    support::run_as_ranks(2, [](const RankGroup& group) {
      gather_mesh_layout(group, {{.tensor = rows(4 * group.rank, 4)}});
    });
  }));
}

// A source of the whole of "w" beside a mesh of two ranks.
struct Whole {
  std::vector<std::byte> bytes = std::vector<std::byte>(64);
  std::vector<std::byte> memory = std::vector<std::byte>(32);
  Layout layout{};
  TensorMap map{.links = {{.model_box = Box::whole({8, 4}), .stored_box = Box::whole({8, 4})}}};
  MeshLayout mesh;

  Whole() {
    const auto storage = layout.add_storage(MemoryStorage{.data = bytes.data(), .size = 64});
    layout.add_tensor({.name = "w",
                       .shape = {8, 4},
                       .shards = {packed_shard(Box::whole({8, 4}), DType::kBF16, storage, 0)}});
    mesh = make_mesh_layout({{rows(0, 4)}, {}}, 1, {{.tensor = rows(4, 4), .data = memory.data()}});
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  }
  CopyPlan plan() const {
    return plan_copy({{.name = "model.w", .shape = {8, 4}}}, {.layout = &layout, .map = &map},
                     {.layout = &mesh.layout, .map = &map});
  }
};

TEST(PartOfRank, IsWhatTheRankHoldsAndAllThatIsRead) {
  Whole whole;
  const auto part = part_of_rank(whole.plan(), whole.mesh);
  ASSERT_EQ(part.tensors.size(), 1U);
  ASSERT_EQ(part.tensors[0].targets.size(), 1U);
  ASSERT_EQ(part.tensors[0].targets[0].size(), 1U);
  EXPECT_EQ(to_string(part.tensors[0].targets[0][0].box), "[4:8, 0:4]");
  support::MemorySource source(whole.layout);
  MemorySink sink(whole.mesh.layout);
  const auto report =
      Executor({.threads = 1, .on_compared = {}}).submit_pieces(part, source, sink).wait();
  EXPECT_EQ(report.bytes, 32);
  EXPECT_EQ(source.bytes_read(), 32);  // not what other ranks hold
  EXPECT_TRUE(support::same_bytes(std::span(whole.bytes).subspan(32), whole.memory));
  EXPECT_NO_THROW(sink.finish());
}

TEST(PartOfRank, NamesAShardThatThePlanDoesNotFill) {
  Whole whole;
  auto plan = whole.plan();
  plan.tensors[0].targets[0].pop_back();
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w [4:8, 0:4]", "0 of its 16 elements"},
                    [&] { part_of_rank(plan, whole.mesh); }));
}

TEST(MemorySink, NamesAShardThatWasNotWrittenWhole) {
  Whole whole;
  MemorySink sink(whole.mesh.layout);
  EXPECT_TRUE(
      fails(ErrorKind::kBug, {"w [4:8, 0:4]", "0 of its 32 bytes"}, [&] { sink.finish(); }));
}

TEST(MemorySink, RefusesTheMemoryOfOthers) {
  Whole whole;
  MemorySink sink(whole.mesh.layout);
  MemorySource source(whole.mesh.layout);
  std::vector<std::byte> bytes(8);
  std::vector<ChecksumPart> parts;
  Region region{.at = {.storage = 0, .offset = 0, .strides = {2}}, .size = {4}, .element_size = 2};
  EXPECT_TRUE(
      fails(ErrorKind::kBug, {"memory of rank 0"}, [&] { source.read(region, bytes, parts); }));
  EXPECT_TRUE(
      fails(ErrorKind::kBug, {"memory of rank 0"}, [&] { sink.write(region, bytes, parts); }));
  region.at.storage = 2;
  region.at.offset = 26;
  EXPECT_TRUE(fails(ErrorKind::kBug, {"leaves the 32 bytes"}, [&] { sink.lease(region); }));
}

}  // namespace mesh_layout_test
}  // namespace ferry::distckpt
