#include "distckpt/formats/torch_dist.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/execute/executor.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/formats/torch_dist_writer.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "distckpt/plan/copy_plan.h"
#include "tests/distckpt/formats/torch_dist_reading.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/memory_box_io.h"
#include "tests/support/random_boxes.h"
#include "tests/support/seed_blocks.h"
#include "tests/support/sha256.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace torch_dist_test {

namespace fs = std::filesystem;
using support::fails;
using support::Random;
using support::same_bytes;
using support::TempDir;
using support::test_data;

// --- What Megatron-Core wrote ---

class TorchDistFixture : public testing::TestWithParam<const char*> {
 protected:
  TorchDistFixture() {
    auto folder = test_data(GetParam());
    stated = nlohmann::json::parse(read_text(folder / "sha256.json"));
    if (fs::exists(folder / "iter_0000010")) folder /= "iter_0000010";
    checkpoint = read_torch_dist(folder);
  }

  nlohmann::json stated;
  TorchDistCheckpoint checkpoint;
};

TEST_P(TorchDistFixture, HoldsTheTensorsThatItsWriterStated) {
  std::vector<const TorchDistTensor*> model;
  for (const auto* tensor : all_tensors(checkpoint)) {
    if (!tensor->key.starts_with("optimizer.")) model.push_back(tensor);
  }
  const auto& expected = stated.at("megatron");
  ASSERT_EQ(model.size(), expected.size());
  const auto resolved = resolve_layout(checkpoint, model);
  EXPECT_NO_THROW(check_layout(resolved.layout));
  FileSource source(resolved.layout.storages(), resolved.checksums);
  const auto bytes = read_all(resolved, source);
  for (std::size_t i = 0; i < model.size(); ++i) {
    ASSERT_TRUE(expected.contains(model[i]->key)) << model[i]->key;
    const auto& one = expected.at(model[i]->key);
    EXPECT_EQ(torch_name(model[i]->dtype), one.at("dtype").get<std::string>());
    EXPECT_EQ(to_string(model[i]->shape),
              fmt::format("[{}]", fmt::join(one.at("shape").get<std::vector<int>>(), ", ")));
    EXPECT_EQ(support::sha256(bytes[i]), one.at("sha256").get<std::string>()) << model[i]->key;
  }
  EXPECT_GT(resolved.checksums.size(), 0U);
  EXPECT_EQ(source.verify_checksums(), std::ssize(resolved.checksums));
}

// Optimizer state, too, is tensors whose bytes the archives' checksums prove.
TEST_P(TorchDistFixture, EveryChunkHasTheChecksumThatItsArchiveStates) {
  const auto all = all_tensors(checkpoint);
  const auto resolved = resolve_layout(checkpoint, all);
  FileSource source(resolved.layout.storages(), resolved.checksums);
  const auto bytes = read_all(resolved, source);
  EXPECT_EQ(source.verify_checksums(), std::ssize(resolved.checksums));
  const auto& expected = stated.at("optimizer_model_space");
  for (std::size_t i = 0; i < all.size(); ++i) {
    // The digests of flattened and reformulated state are those of other shapes.
    if (!expected.contains(all[i]->key)) continue;
    const auto& one = expected.at(all[i]->key);
    if (one.at("shape").get<std::vector<std::int64_t>>() !=
        std::vector(all[i]->shape.begin(), all[i]->shape.end())) {
      continue;
    }
    EXPECT_EQ(support::sha256(bytes[i]), one.at("sha256").get<std::string>()) << all[i]->key;
  }
}

TEST_P(TorchDistFixture, ObjectsAndCommonStateAreReadable) {
  EXPECT_NO_THROW(check_objects(checkpoint));
  EXPECT_TRUE(std::ranges::is_sorted(checkpoint.tensors, {}, &TorchDistTensor::key));
  EXPECT_TRUE(std::ranges::is_sorted(checkpoint.objects, {}, &TorchDistObject::key));
  const auto common = read_common_state(checkpoint);
  ASSERT_TRUE(common.has_value());
  EXPECT_EQ(common_dict(*common).kind(), PickleKind::kDict);
}

INSTANTIATE_TEST_SUITE_P(,
                         TorchDistFixture,
                         testing::Values("llama_tp1",
                                         "llama_tp2pp2",
                                         "llama_tp2pp2_local",
                                         "llama_tp2pp2_mc0131",
                                         "llama_tp2pp2_mc0161",
                                         "llama_singleton",
                                         "qwen2",
                                         "qwen2_tied_pp2",
                                         "qwen3",
                                         "llama_optim_full",
                                         "llama_optim_dp",
                                         "llama_optim_fsms"),
                         [](const auto& folder) { return std::string(folder.param); });

// --- What TorchDistTarget writes ---

// A tensor cut into random chunks, each the main replica of some rank, some replicated on others.
void add_random_tensor(Random& random, int number, std::vector<RankState>& ranks) {
  constexpr std::array kDTypes{DType::kBF16, DType::kF32, DType::kI64, DType::kU8, DType::kF8E4M3};
  const auto shape = support::random_shape(random, static_cast<int>(random.between(1, 4)), 1, 12);
  const auto dtype = kDTypes[static_cast<std::size_t>(random.between(0, 4))];
  const auto rank_of = [&]() -> RankState& {
    return ranks[static_cast<std::size_t>(random.between(0, std::ssize(ranks) - 1))];
  };
  for (const auto& box : support::random_tiling(random, shape, 6)) {
    ShardedTensor shard{.key = fmt::format("decoder.{}.weight", number),
                        .dtype = dtype,
                        .local_shape = box.size,
                        .global_shape = shape,
                        .global_offset = box.offset};
    while (shard.local_shape.rank() > 0 && shard.local_shape[0] == 1 && random.chance(30)) {
      shard.local_shape = shard.local_shape.drop_front(1);
      ++shard.prepend_axis_num;
    }
    shard.replica_id = {0, 0};
    rank_of().tensors.push_back(shard);
    if (random.chance(40)) {
      shard.replica_id = {0, 1};
      rank_of().tensors.push_back(shard);
    }
  }
}

class RandomTorchDistTarget : public support::SeedBlocks {};
INSTANTIATE_TEST_SUITE_P(Blocks, RandomTorchDistTarget, RandomTorchDistTarget::all());

TEST_P(RandomTorchDistTarget, WritesWhatIsReadBack) {
  for_each_seed(1, 40, [&](std::uint64_t seed) {
    const TempDir dir;
    Random random(seed);
    std::vector<RankState> ranks(static_cast<std::size_t>(random.between(1, 4)));
    for (int i = 0; i < 5; ++i) add_random_tensor(random, i, ranks);
    ranks.back().extra_states.push_back(
        {.key = "decoder._extra_state", .global_shape = {2, 4}, .global_offset = {1, 3}});
    const TorchDistTarget target(dir.path(), ranks, [](PickleWriter& pickle) {
      pickle.begin_dict().string("iteration").integer(10).end_dict();
    });

    // Random bytes in memory, copied into the target's layout by the executor.
    Layout memory;
    TensorMap map;
    std::vector<ModelTensor> tensors;
    std::vector<std::vector<std::byte>> bytes;
    for (const auto& tensor : target.layout().tensors()) {
      const auto index = static_cast<std::uint32_t>(tensors.size());
      const auto whole = Box::whole(tensor.shape);
      bytes.push_back(random.bytes(tensor.num_bytes()));
      const auto storage = memory.add_storage(
          MemoryStorage{.data = bytes.back().data(), .size = std::ssize(bytes.back())});
      memory.add_tensor({.name = tensor.name,
                         .dtype = tensor.dtype,
                         .shape = tensor.shape,
                         .shards = {packed_shard(whole, tensor.dtype, storage, 0)}});
      tensors.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
      map.links.push_back(
          {.model = index, .model_box = whole, .stored = index, .stored_box = whole});
    }
    const auto plan = plan_copy(tensors, {.layout = &memory, .map = &map},
                                {.layout = &target.layout(), .map = &map});
    support::MemorySource source(memory);
    FileSink sink(target.layout().storages(), target.protected_ranges(), WriteFile::Mode::kCreate);
    Executor({.threads = 3}).submit(plan, source, &sink).wait();
    target.finish_files(sink);
    target.finish_folder();

    EXPECT_TRUE(is_torch_dist(dir.path()));
    const auto found = read_torch_dist(dir.path());
    ASSERT_EQ(found.tensors.size(), bytes.size());
    ASSERT_EQ(found.objects.size(), 1U);
    EXPECT_EQ(found.objects[0].key, "decoder._extra_state/shard_1.3_2.4");
    EXPECT_NO_THROW(check_objects(found));
    EXPECT_EQ(common_dict(*read_common_state(found)).at("iteration").as_int(), 10);
    std::int64_t num_bytes = 0;
    for (const auto& file : found.files) num_bytes += file.size;
    EXPECT_EQ(target.num_bytes(), num_bytes);
    const auto resolved = resolve_layout(found, all_tensors(found));
    EXPECT_EQ(std::ssize(resolved.checksums), std::ssize(target.protected_ranges()));
    FileSource files(resolved.layout.storages(), resolved.checksums);
    const auto back = read_all(resolved, files);
    for (std::size_t i = 0; i < back.size(); ++i) {
      const auto index = target.layout().find(found.tensors[i].key);
      ASSERT_TRUE(index.has_value());
      ASSERT_TRUE(same_bytes(bytes[*index], back[i])) << found.tensors[i].key;
    }
    EXPECT_EQ(files.verify_checksums(), std::ssize(resolved.checksums));
  });
}

TEST(TorchDistTarget, RefusesToFinishWhatWasNotWrittenWhole) {
  const TempDir dir;
  const ShardedTensor shard{
      .key = "w", .local_shape = {2, 3}, .global_shape = {2, 3}, .global_offset = {0, 0}};
  const TorchDistTarget target(dir.path(), {{.tensors = {shard}}},
                               [](PickleWriter& pickle) { pickle.begin_dict().end_dict(); });
  FileSink sink(target.layout().storages(), target.protected_ranges(), WriteFile::Mode::kCreate);
  EXPECT_TRUE(fails(ErrorKind::kBug, {"w [0:2, 0:3]", "not written whole"},
                    [&] { target.finish_files(sink); }));
  EXPECT_FALSE(is_torch_dist(dir.path()));
}

TEST(TorchDistTarget, RefusesRanksThatDisagree) {
  const auto make = [](DType dtype, Shape global) {
    return RankState{.tensors = {{.key = "w",
                                  .dtype = dtype,
                                  .local_shape = {2, 3},
                                  .global_shape = global,
                                  .global_offset = {0, 0}}}};
  };
  const auto target = [](const std::vector<RankState>& ranks) {
    TorchDistTarget("folder", ranks, [](PickleWriter& pickle) { pickle.begin_dict().end_dict(); });
  };
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "fp32", "rank 1", "bf16"}, [&] {
    target({make(DType::kBF16, {4, 3}), make(DType::kF32, {4, 3})});
  }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "[4, 4]", "[4, 3]"}, [&] {
    target({make(DType::kBF16, {4, 3}), make(DType::kBF16, {4, 4})});
  }));
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"w", "dimension 1"}, [&] {
    target({make(DType::kBF16, {4, 2})});
  }));
}

}  // namespace torch_dist_test
}  // namespace ferry::distckpt
