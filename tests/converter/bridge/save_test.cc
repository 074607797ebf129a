// Ranks save what they hold: the checkpoint is that of the model, whoever reads it.
#include "converter/bridge/save.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <string>
#include <utility>

#include "converter/convert.h"
#include "converter/digest_checkpoint.h"
#include "converter/verify.h"
#include "distckpt/execute/memory_io.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/parallel_model.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"
#include "tests/support/trees.h"

namespace ferry::converter {
namespace save_test {

namespace fs = std::filesystem;
using distckpt::DType;
using distckpt::MemorySource;
using distckpt::MeshLayout;
using distckpt::RankGroup;
using support::fails;
using support::MeshOptions;
using support::ParallelModel;
using support::TempDir;
using support::test_data;
using support::TinyModel;

// A model in the memory of its ranks, loaded from a folder.
struct Loaded {
  Checkpoint origin;
  MeshOptions mesh;
  ParallelModel model;

  Loaded(const fs::path& folder, const MeshOptions& options, const OpenOptions& how = {})
      : origin(open(folder, how)), mesh(options), model(origin.map, origin.tensors, options) {
    for (int rank = 0; rank < model.size(); ++rank)
      load_rank(origin, model, rank, {.keep_padding = how.training_state, .threads = 1});
  }

  SaveOptions to(const fs::path& folder) const {
    return {.config = origin.map.config,
            .to = folder,
            .parallel = mesh.parallel,
            .origin = &origin,
            .threads = 1};
  }

  void save_as(const SaveOptions& options) const {
    model.run([&](const RankGroup& group, const MeshLayout& gathered) {
      MemorySource memory(gathered.layout);
      converter::save(group, gathered, memory, options);
    });
  }
};

// A random model, held by a random mesh.
class SaveByARandomMesh : public testing::TestWithParam<std::uint64_t> {};

TEST_P(SaveByARandomMesh, IsTheCheckpointOfTheModel) {
  std::mt19937_64 random(GetParam());
  const auto tiny = support::random_tiny_model(random);
  const TempDir dir;
  support::write_tiny_model(tiny, dir / "hf", GetParam());
  const auto draw = [&] { return random() % 2 == 0; };
  const Loaded loaded(dir / "hf", {.parallel = random_layout(tiny, random),
                                   .dp = draw() ? 1 : 2,
                                   .by_rows = draw(),
                                   .stored_head = draw(),
                                   .transposed = draw(),
                                   .dtype = {}});
  auto options = loaded.to(dir / "saved");
  options.prove = draw();
  loaded.save_as(options);
  const auto report = verify({.left = dir / "saved", .right = dir / "hf"});
  EXPECT_TRUE(report.tensors.empty() && report.configuration.empty() && report.files.empty());
  // A derived tensor is no part of a model in memory, and an fp32 bias was widened.
  for (const auto& one : report.unpaired) {
    const bool expected =
        one.tensor.ends_with("inv_freq") || one.tensor.ends_with("correction_bias");
    EXPECT_TRUE(expected) << one.tensor;
  }
  EXPECT_GT(report.num_compared, 10);
  convert({.from = dir / "saved", .to = dir / "back"});  // checks every tensor and object
  EXPECT_FALSE(fs::exists(dir / ".saved.ferry"));
}

INSTANTIATE_TEST_SUITE_P(Seeds, SaveByARandomMesh, testing::Range<std::uint64_t>(500, 540));

TEST(Save, OfAModelThatWasOnlyLoadedComesBackAsTheSameFolder) {
  for (const char* name : {"hf_llama", "hf_qwen2_tied", "hf_qwen3_moe"}) {
    SCOPED_TRACE(name);
    const TempDir dir;
    const Loaded loaded(test_data(name) / "hf",
                        {.parallel = {.tensor_model_parallel_size = 2}, .dtype = {}});
    loaded.save_as(loaded.to(dir / "saved"));
    convert({.from = dir / "saved", .to = dir / "back"});
    EXPECT_TRUE(support::same_tree(test_data(name) / "hf", dir / "back"));
  }
}

TEST(Save, IsLoadedByAnotherMesh) {
  const TempDir dir;
  const auto folder = test_data("hf_deepseek_v3") / "hf";
  const Loaded loaded(folder, {.parallel = {.tensor_model_parallel_size = 2,
                                            .expert_model_parallel_size = 2,
                                            .expert_tensor_parallel_size = 1},
                               .by_rows = true,
                               .dtype = {}});
  loaded.save_as(loaded.to(dir / "saved"));
  const auto saved = open(dir / "saved");
  const support::NaiveWeights weights(folder, saved.map.config);
  for (const auto& mesh : support::meshes_for(saved.map.config))
    ASSERT_NO_FATAL_FAILURE(support::expect_loads(saved, weights, mesh));
}

TEST(Save, WritesWhatTheMemoryHoldsNow) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  const Loaded loaded(dir / "hf", {.parallel = {.pipeline_model_parallel_size = 2}, .dtype = {}});
  const auto& shards = loaded.model.sharded_state_dict(1);
  const auto norm = std::ranges::find_if(shards, [](const distckpt::LocalShard& shard) {
    return shard.tensor.key == "decoder.final_layernorm.weight";
  });
  ASSERT_NE(norm, shards.end());
  norm->data[3] ^= std::byte{1};
  loaded.save_as(loaded.to(dir / "saved"));
  const auto report = verify({.left = dir / "hf", .right = dir / "saved"});
  ASSERT_EQ(report.tensors.size(), 1U);
  EXPECT_EQ(report.tensors[0].tensor, "model.norm.weight");
}

TEST(Save, KeepsWhatLiesBeyondTheVocabulary) {
  const TempDir dir;
  support::write_tiny_model({.vocab = 50}, dir / "hf", 1);
  const Loaded loaded(dir / "hf", {.parallel = {.make_vocab_size_divisible_by = 64}, .dtype = {}});
  const auto& embedding = loaded.model.sharded_state_dict(0).front();
  ASSERT_EQ(embedding.tensor.key, "embedding.word_embeddings.weight");
  const auto place = 60 * embedding.tensor.local_shape[1] * 2;
  embedding.data[place] = std::byte{0x3C};
  loaded.save_as(loaded.to(dir / "saved"));
  const auto saved = open(dir / "saved");
  const ParallelModel again(saved.map, saved.tensors, loaded.mesh);
  load_rank(saved, again, 0, {.keep_padding = true, .threads = 1});
  EXPECT_EQ(again.sharded_state_dict(0).front().data[place], std::byte{0x3C});
}

TEST(Save, OfAModelOfAnotherDtypeSaysSoInItsConfiguration) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  const Loaded loaded(dir / "hf", {.dtype = DType::kF32});
  loaded.save_as(loaded.to(dir / "saved"));
  convert({.from = dir / "saved", .to = dir / "back"});
  const auto back = open(dir / "back");
  EXPECT_EQ(back.tensors.front().dtype, DType::kF32);
  EXPECT_NE(distckpt::read_text(dir / "back" / "config.json").find("float32"), std::string::npos);
}

TEST(Save, OfWeightsWithoutAnOriginIsReadWithAConfiguration) {
  const TempDir dir;
  support::write_tiny_model({.family = "qwen3"}, dir / "hf", 1);
  const Loaded loaded(dir / "hf", {.parallel = {.tensor_model_parallel_size = 2}, .dtype = {}});
  auto options = loaded.to(dir / "saved");
  options.origin = nullptr;
  options.iteration = {.number = 12};
  loaded.save_as(options);
  EXPECT_EQ(distckpt::read_text(dir / "saved" / "latest_checkpointed_iteration.txt"), "12");
  EXPECT_FALSE(fs::exists(dir / "saved" / "iter_0000012" / "ferry"));
  const auto saved = open(dir / "saved", {.hf_config = dir / "hf"});
  const support::NaiveWeights weights(dir / "hf", saved.map.config);
  support::expect_loads(saved, weights, {.dtype = {}});
}

TEST(Save, LetsARankThatHoldsNoMainReplicaWriteNoFile) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  const Loaded loaded(dir / "hf", {.dp = 2, .dtype = {}});
  loaded.save_as(loaded.to(dir / "saved"));
  EXPECT_TRUE(fs::exists(dir / "saved" / "release" / "__0_0.distcp"));
  EXPECT_FALSE(fs::exists(dir / "saved" / "release" / "__1_0.distcp"));
}

// --- The state of a training run ---

// Megatron-Core's own training checkpoints: what is loaded onto ranks and saved by them is the same
// run, at another layout.
TEST(Save, OfAnOptimizerIsTheStateThatWasLoaded) {
  const std::pair<const char*, models::ParallelConfig> cases[] = {
      {"llama_optim_full", {.tensor_model_parallel_size = 2}},
      {"llama_optim_dp", {.pipeline_model_parallel_size = 2}},
      {"qwen2_tied_optim_dp", {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}},
      {"mixtral_optim_dp", {.tensor_model_parallel_size = 2, .expert_model_parallel_size = 2}}};
  for (auto [name, parallel] : cases) {
    SCOPED_TRACE(name);
    const TempDir dir;
    parallel.make_vocab_size_divisible_by = 4;
    const Loaded loaded(
        test_data(name),
        {.parallel = parallel, .dtype = {}, .optimizer = {"exp_avg", "exp_avg_sq", "param"}},
        {.training_state = true});
    auto options = loaded.to(dir / "saved");
    options.prove = true;
    loaded.save_as(options);
    const auto report = verify({.left = test_data(name), .right = dir / "saved"});
    EXPECT_TRUE(report.tensors.empty() && report.unpaired.empty()) << report.tensors.size();
    EXPECT_GT(report.num_compared, 100);
    const auto saved = open(dir / "saved", {.training_state = true});
    EXPECT_EQ(saved.training->optimizer.kinds, loaded.origin.training->optimizer.kinds);
    EXPECT_EQ(saved.training->param_groups.size(), loaded.origin.training->param_groups.size());
  }
}

TEST(Save, NeedsTheParameterGroupsOfAnOptimizer) {
  const TempDir dir;
  const MeshOptions mesh{
      .parallel = {.make_vocab_size_divisible_by = 4}, .dtype = {}, .optimizer = {"exp_avg"}};
  const Loaded loaded(test_data("llama_optim_full"), mesh, {.training_state = true});
  auto options = loaded.to(dir / "saved");
  options.origin = nullptr;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"common state"}, [&] { loaded.save_as(options); }));
  options.common = open(test_data("llama_tp1")).common;  // of a run without an optimizer
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"param_groups"}, [&] { loaded.save_as(options); }));
  options.common = loaded.origin.common;
  loaded.save_as(options);
  EXPECT_EQ(open(dir / "saved", {.training_state = true}).training->optimizer.kinds,
            std::vector<std::string>{"exp_avg"});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"optimizer.state.exp_avg", "does not hold it"},
                    [&] { const Loaded without(test_data("hf_llama") / "hf", mesh); }));
}

TEST(Save, CarriesTheObjectsOfAllRanks) {
  const TempDir dir;
  const Loaded loaded(
      test_data("llama_optim_zero"),
      {.parallel = {.tensor_model_parallel_size = 2, .make_vocab_size_divisible_by = 4},
       .dtype = {}},
      {.training_state = true});
  const auto& rng = loaded.origin.training->rng;
  ASSERT_EQ(rng.size(), 2U);
  const auto save_with = [&](const std::function<distckpt::StoredObject(int)>& object_of) {
    loaded.model.run([&](const RankGroup& group, const MeshLayout& mesh) {
      MemorySource memory(mesh.layout);
      auto options = loaded.to(dir / "saved");
      options.prove = true;
      options.objects = {rng[static_cast<std::size_t>(group.rank)], object_of(group.rank)};
      converter::save(group, mesh, memory, options);
    });
  };
  save_with([&](int rank) {
    return distckpt::StoredObject{.key = fmt::format("trainer.cursor/shard_{}_2", rank),
                                  .archive = rng[0].archive};
  });
  convert({.from = dir / "saved",
           .to = dir / "moved",
           .format = Format::kTorchDist,
           .parallel = {.pipeline_model_parallel_size = 2}});
  const auto saved = open(dir / "saved", {.training_state = true});
  EXPECT_EQ(saved.training->rng.size(), 2U);
  const auto moved = open(dir / "moved", {.training_state = true});
  EXPECT_TRUE(moved.training->rng.empty());  // of another layout
  ASSERT_EQ(moved.training->objects.size(), 2U);
  EXPECT_EQ(moved.training->objects[1].key, "trainer.cursor/shard_1_2");
  EXPECT_EQ(moved.training->objects[1].archive, rng[0].archive);

  fs::remove_all(dir / "saved");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"trainer.cursor/shard_0_1", "several ranks"}, [&] {
    save_with([&](int) {
      return distckpt::StoredObject{.key = "trainer.cursor/shard_0_1", .archive = rng[0].archive};
    });
  }));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"cursor/shard_", "is no key"}, [&] {
    save_with([&](int rank) {
      return distckpt::StoredObject{.key = fmt::format("cursor/shard_{}_2", rank),
                                    .archive = rng[0].archive};
    });
  }));
  EXPECT_FALSE(fs::exists(dir / "saved"));
}

// --- The proof ---

TEST(Save, ProvesWhatItWroteAndDigestsIt) {
  const TempDir dir;
  support::write_tiny_model({.vocab = 50}, dir / "hf", 1);
  const Loaded loaded(dir / "hf",
                      {.parallel = {.tensor_model_parallel_size = 2}, .dp = 2, .dtype = {}});
  auto options = loaded.to(dir / "saved");
  options.prove = true;
  loaded.model.run([&](const RankGroup& group, const MeshLayout& mesh) {
    MemorySource memory(mesh.layout);
    const auto report = converter::save(group, mesh, memory, options);
    EXPECT_TRUE(report.proved);
    EXPECT_EQ(report.manifest.has_value(), group.rank == 0);
    if (!report.manifest) return;
    const auto expected = digest_checkpoint({.path = dir / "saved", .files = false});
    EXPECT_EQ(write_manifest(*report.manifest), write_manifest(expected));
    EXPECT_EQ(expected.model_digest, digest_checkpoint({.path = dir / "hf"}).model_digest);
  });
}

TEST(Save, IsNotReadByMoreUsersThanItsOrigin) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  fs::permissions(dir / "hf/config.json", fs::perms(0600));
  fs::permissions(dir / "hf", fs::perms(0750));
  const Loaded loaded(dir / "hf", {.dtype = {}});
  loaded.save_as(loaded.to(dir / "run/saved"));
  const auto mode = [&](const char* name) { return fs::status(dir / name).permissions(); };
  EXPECT_EQ(mode("run/saved/release"), fs::perms(0750));
  EXPECT_EQ(mode("run/saved"), fs::perms(0750));
  for (const auto* name : {"release/.metadata", "release/__0_0.distcp",
                           "release/ferry/sidecar.json", "latest_checkpointed_iteration.txt"})
    EXPECT_EQ(mode(fmt::format("run/saved/{}", name).c_str()), fs::perms(0600)) << name;
}

// Memory that changes its bytes from the n-th read on.
class FaultySource : public MemorySource {
 public:
  using Fault = std::function<void(std::span<std::byte>)>;
  FaultySource(const distckpt::Layout& layout, int good_reads, Fault fault)
      : MemorySource(layout), left_(good_reads), fault_(std::move(fault)) {}
  void read(const distckpt::Region& region,
            std::span<std::byte> packed,
            std::vector<distckpt::ChecksumPart>& parts) override {
    MemorySource::read(region, packed, parts);
    if (left_-- <= 0) fault_(packed);
  }

 private:
  std::atomic<int> left_;
  Fault fault_;
};

TEST(Save, PublishesNothingThatIsNotWhatTheMemoryHolds) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  const Loaded loaded(dir / "hf", {.dtype = {}});
  const auto num_shards = static_cast<int>(loaded.model.sharded_state_dict(0).size());
  auto options = loaded.to(dir / "saved");
  options.prove = true;
  const auto mesh = loaded.model.mesh(0);
  int failures = 0;
  for (int same_reads = 0; same_reads <= 4 * num_shards; same_reads += 5) {
    // Memory that somebody goes on writing to.
    FaultySource memory(mesh.layout, same_reads, [](std::span<std::byte> packed) {
      if (!packed.empty()) packed[0] ^= std::byte{1};
    });
    try {
      save({}, mesh, memory, options);
    } catch (const Error& error) {
      EXPECT_TRUE(support::is_error(error, ErrorKind::kCorrupt, {"other bytes", "while copying"}));
      EXPECT_FALSE(fs::exists(dir / "saved" / "release"));
      ++failures;
    }
    fs::remove_all(dir / "saved");
  }
  EXPECT_GE(failures, num_shards / 5);
}

// --- Faults ---

TEST(Save, RefusesToReplaceACheckpointUnlessTold) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  const Loaded loaded(dir / "hf", {.parallel = {.tensor_model_parallel_size = 2}, .dtype = {}});
  auto options = loaded.to(dir / "saved");
  loaded.save_as(options);
  const auto before = support::read_tree(dir / "saved");
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"release", "exists already"}, [&] { loaded.save_as(options); }));
  EXPECT_EQ(support::read_tree(dir / "saved"), before);
  loaded.model.sharded_state_dict(0).back().data[0] ^= std::byte{1};
  options.overwrite = true;
  loaded.save_as(options);
  EXPECT_NE(support::read_tree(dir / "saved"), before);
  EXPECT_FALSE(verify({.left = dir / "hf", .right = dir / "saved"}).identical());
}

TEST(Save, ThatFailsOnOneRankLeavesWhatWasThere) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  const Loaded loaded(dir / "hf", {.parallel = {.tensor_model_parallel_size = 2}, .dtype = {}});
  auto options = loaded.to(dir / "saved");
  loaded.save_as(options);
  const auto before = support::read_tree(dir / "saved");
  options.overwrite = true;
  for (const int good_reads : {0, 7}) {
    std::atomic<int> cancelled = 0;
    const auto save_faulty = [&] {
      loaded.model.run([&](const RankGroup& group, const MeshLayout& mesh) {
        FaultySource memory(mesh.layout, group.rank == 1 ? good_reads : 1 << 20, [](auto) {
          throw Error(ErrorKind::kDevice, "the device fell off the bus");
        });
        try {
          save(group, mesh, memory, options);
        } catch (const Error& error) {
          EXPECT_TRUE(support::is_error(error, error.kind(), {"fell off the bus", "saving"}));
          if (error.kind() == ErrorKind::kCancelled) ++cancelled;
          throw;
        }
      });
    };
    EXPECT_TRUE(fails(ErrorKind::kDevice, {"while copying"}, save_faulty));
    EXPECT_EQ(cancelled, 1);
    EXPECT_EQ(support::read_tree(dir / "saved"), before);
    EXPECT_FALSE(fs::exists(dir / "saved" / ".release.ferry"));
  }
}

TEST(Save, NamesARankThatCannotWrite) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  const Loaded loaded(dir / "hf", {.dtype = {}});
  std::ofstream(dir / "file") << "no folder";
  EXPECT_TRUE(fails(ErrorKind::kIo, {"file"}, [&] { loaded.save_as(loaded.to(dir / "file")); }));
}

TEST(Save, RefusesAMeshWithOtherPaddingThanItsArgumentsSay) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  const Loaded loaded(dir / "hf", {.dtype = {}});
  auto options = loaded.to(dir / "saved");
  options.parallel.make_vocab_size_divisible_by = 1;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"embedding.word_embeddings.weight", "128 rows", "50"},
                    [&] { loaded.save_as(options); }));
  EXPECT_FALSE(fs::exists(dir / "saved"));
}

TEST(Save, RefusesAnOriginWhoseModelTypeIsNotKnown) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  auto config = distckpt::read_text(dir / "hf/config.json");
  config.replace(config.find("\"llama\""), 7, "\"llamb\"");
  distckpt::write_text(dir / "hf/config.json", config);
  const auto origin = open(dir / "hf");
  const auto mesh = distckpt::make_mesh_layout({{}}, 0, {});
  MemorySource memory(mesh.layout);
  const SaveOptions options{.config = origin.map.config, .to = dir / "saved", .origin = &origin};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"the model_type \"llamb\" is not known"},
                    [&] { save({}, mesh, memory, options); }));
  EXPECT_FALSE(fs::exists(dir / "saved"));
}

TEST(Save, NamesATensorThatNoRankHolds) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  const Loaded loaded(dir / "hf", {.dtype = {}});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"decoder.final_layernorm.weight", "is missing"}, [&] {
    auto shards = loaded.model.sharded_state_dict(0);
    std::erase_if(shards, [](const distckpt::LocalShard& shard) {
      return shard.tensor.key == "decoder.final_layernorm.weight";
    });
    const auto mesh = distckpt::make_mesh_layout({{}}, 0, shards);
    MemorySource memory(mesh.layout);
    save({}, mesh, memory, loaded.to(dir / "saved"));
  }));
}

}  // namespace save_test
}  // namespace ferry::converter
