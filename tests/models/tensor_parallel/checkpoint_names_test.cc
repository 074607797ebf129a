// converter and models know nothing of each other. That they mean the same by every name is held
// here: what a model's ranks hold is what the mapping tables of its family expect, and what is
// loaded into them is saved again.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "converter/bridge/load.h"
#include "converter/bridge/save.h"
#include "converter/families/megatron_links.h"
#include "converter/optimizer/sharded_state.h"
#include "converter/verify.h"
#include "models/distributed/parallel_state.h"
#include "models/distributed/world.h"
#include "models/gpt_model.h"
#include "models/reshard/device_box_io.h"
#include "models/spec/sharding.h"
#include "tests/support/files.h"
#include "tests/support/models/parallel_model.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/seed_blocks.h"
#include "tests/support/temp_dir.h"

namespace ferry::models {
namespace checkpoint_names_test {

using distckpt::ShardedTensor;
using models::ParallelConfig;
using models::TransformerConfig;
using support::TempDir;

constexpr std::string_view kFamilies[] = {"hf_llama",     "hf_qwen2",       "hf_qwen2_tied",
                                          "hf_qwen3",     "hf_mixtral",     "hf_qwen2_moe",
                                          "hf_qwen3_moe", "hf_deepseek_v2", "hf_deepseek_v3",
                                          "hf_moonlight", "hf_glm4_moe"};

std::vector<ParameterSpec> parameters_of(const TransformerConfig& config,
                                         const MeshShape& mesh,
                                         int rank,
                                         Alignment alignment) {
  std::vector<ParameterSpec> all;
  const auto at = mesh.coordinates(rank);
  for (const auto& chunk : stage_chunks(config, mesh.parallel(), at.pp)) {
    for (auto& spec : parameter_layout(config, mesh, at, chunk, {.alignment = alignment}))
      all.push_back(std::move(spec));
  }
  return all;
}

std::vector<std::vector<ShardedTensor>> shards_of(const TransformerConfig& config,
                                                  const MeshShape& mesh,
                                                  Alignment alignment) {
  std::vector<std::vector<ShardedTensor>> ranks;
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    ranks.emplace_back();
    for (const auto& spec : parameters_of(config, mesh, rank, alignment)) {
      for (auto& shard : spec.sharded_tensors()) ranks.back().push_back(std::move(shard));
    }
  }
  return ranks;
}

// The layout in the view of a further rank, which holds nothing.
distckpt::MeshLayout layout_of(std::vector<std::vector<ShardedTensor>> ranks) {
  ranks.emplace_back();
  const auto last = static_cast<int>(ranks.size()) - 1;
  return distckpt::make_mesh_layout(std::move(ranks), last, {});
}

MeshShape mesh_of(const ParallelConfig& parallel, int dp) {
  const auto stage =
      std::lcm(parallel.tensor_model_parallel_size * parallel.context_parallel_size,
               parallel.expert_tensor_parallel() * parallel.expert_model_parallel_size);
  return {parallel, stage * parallel.pipeline_model_parallel_size * dp};
}

TEST(CheckpointNames, OfEveryFamilyAreThoseOfTheTablesOnEveryMesh) {
  for (const auto family : kFamilies) {
    const auto checkpoint = converter::open(support::test_data(family) / "hf");
    for (auto options : support::meshes_for(checkpoint.map.config)) {
      for (const int cp : {1, 2}) {
        options.parallel.context_parallel_size = cp;
        for (const auto alignment : {Alignment::kFast, Alignment::kBitwise}) {
          const auto mesh = mesh_of(options.parallel, options.dp);
          SCOPED_TRACE(fmt::format("{} on {} ranks", family, mesh.world_size()));
          const auto layout = layout_of(shards_of(checkpoint.map.config, mesh, alignment));
          ASSERT_NO_THROW(converter::plan_load(checkpoint, layout));
        }
      }
    }
  }
}

std::set<std::string> describe(const std::vector<ShardedTensor>& shards) {
  std::set<std::string> text;
  for (const auto& shard : shards) {
    if (shard.replica_id[0] != 0) continue;  // a copy of the embedding, which the tables have once
    text.insert(fmt::format("{} {} of {}{}", shard.key, to_string(shard.box()),
                            to_string(shard.global_shape), shard.is_main_replica() ? "" : "*"));
  }
  return text;
}

class CheckpointNamesOfRandomModels : public support::SeedBlocks {};
INSTANTIATE_TEST_SUITE_P(Blocks,
                         CheckpointNamesOfRandomModels,
                         CheckpointNamesOfRandomModels::all());

TEST_P(CheckpointNamesOfRandomModels, AndBoxesAreThoseOfTheConvertersRanks) {
  for_each_seed(0, 99, [&](std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto tiny = support::random_tiny_model(random);
    const TempDir dir;
    support::write_tiny_model(tiny, dir / "hf", seed);
    const auto map = converter::open(dir / "hf").map;
    const auto parallel = random_layout(tiny, random);
    const auto expected = rank_tensors(map, parallel);
    const auto mesh = mesh_of(parallel, 1);
    ASSERT_EQ(static_cast<std::size_t>(mesh.world_size()), expected.size());
    const auto found = shards_of(map.config, mesh, Alignment::kFast);
    for (std::size_t rank = 0; rank < expected.size(); ++rank) {
      std::vector<ShardedTensor> shards;
      for (const auto& local : expected[rank]) {
        for (const auto& box : local.boxes) {
          shards.push_back({.key = single_key(map.megatron[local.megatron]),
                            .local_shape = box.size,
                            .global_shape = local.shape,
                            .global_offset = box.offset,
                            .replica_id = local.replica_id});
        }
      }
      ASSERT_EQ(describe(found[rank]), describe(shards)) << "rank " << rank;
    }
  });
}

// Through the memory of real models and the group of real ranks.
void expect_loaded_and_saved(std::string_view family,
                             const ParallelConfig& parallel,
                             int dp,
                             Alignment alignment) {
  const TempDir dir;
  const auto folder = support::test_data(family) / "hf";
  const auto checkpoint = converter::open(folder);
  const auto& config = checkpoint.map.config;
  const auto shape = mesh_of(parallel, dp);
  run_ranks(shape.world_size(), {}, [&](World& world) {
    const ParallelState mesh(world, parallel, "actor");
    std::vector<std::unique_ptr<GPTModel>> chunks;
    std::vector<distckpt::LocalShard> shards;
    for (auto& stage : stage_chunks(config, parallel, mesh.coordinates().pp)) {
      chunks.push_back(
          std::make_unique<GPTModel>(config, mesh, stage, ModelOptions{.alignment = alignment}));
      for (auto& shard : chunks.back()->sharded_state_dict()) shards.push_back(std::move(shard));
    }
    const distckpt::RankGroup group{
        .rank = world.rank(), .size = world.size(), .all_gather_bytes = [&](std::string_view mine) {
          return mesh.all().all_gather_bytes(mine);
        }};
    const auto layout = distckpt::gather_mesh_layout(group, std::move(shards));
    converter::load(checkpoint, layout, *make_memory_sink(layout.layout),
                    {.threads = 1, .staging = staging_memory()});
    const support::NaiveWeights weights(folder, config);
    support::expect_holds(layout.shards, weights);
    const auto report = converter::save(group, layout, *make_memory_source(layout.layout),
                                        {.config = config,
                                         .to = dir / "saved",
                                         .parallel = parallel,
                                         .origin = &checkpoint,
                                         .threads = 1,
                                         .staging = staging_memory()});
    EXPECT_EQ(report.folder.filename(), "release");
  });
  EXPECT_TRUE(converter::verify({.left = folder, .right = dir / "saved"}).identical());
}

TEST(CheckpointNames, LeadIntoTheMemoryOfModelsAndOutOfItAgain) {
  expect_loaded_and_saved("hf_llama",
                          {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}, 1,
                          Alignment::kFast);
  expect_loaded_and_saved("hf_qwen2_tied", {.pipeline_model_parallel_size = 2}, 2,
                          Alignment::kBitwise);
  expect_loaded_and_saved(
      "hf_qwen3", {.pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 2}, 1,
      Alignment::kFast);
  expect_loaded_and_saved("hf_mixtral",
                          {.tensor_model_parallel_size = 2,
                           .expert_model_parallel_size = 2,
                           .expert_tensor_parallel_size = 1},
                          1, Alignment::kBitwise);
  expect_loaded_and_saved("hf_deepseek_v3",
                          {.tensor_model_parallel_size = 2,
                           .context_parallel_size = 2,
                           .expert_model_parallel_size = 2},
                          1, Alignment::kFast);
}

}  // namespace checkpoint_names_test
}  // namespace ferry::models
