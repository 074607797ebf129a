// Models of every family on meshes of every kind, loaded from every format: what lies in each
// rank's memory is what was cut out of the Hugging Face files by hand.
#include "converter/bridge/load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "converter/convert.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/parallel_model.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace load_test {

namespace fs = std::filesystem;
using distckpt::DType;
using distckpt::LocalShard;
using support::expect_loads;
using support::fails;
using support::load_rank;
using support::MeshOptions;
using support::NaiveWeights;
using support::packed_bytes;
using support::ParallelModel;
using support::same_bytes;
using support::TempDir;
using support::test_data;
using support::TinyModel;

MeshOptions random_mesh(const TinyModel& model, std::mt19937_64& random) {
  const auto draw = [&] { return random() % 2 == 0; };
  return {.parallel = random_layout(model, random),
          .dp = draw() ? 1 : 2,
          .by_rows = draw(),
          .stored_head = draw(),
          .transposed = draw(),
          .dtype = {}};
}

// A random model, loaded by a random mesh.
class LoadOntoARandomMesh : public testing::TestWithParam<std::uint64_t> {};

TEST_P(LoadOntoARandomMesh, GivesEachRankItsBoxes) {
  std::mt19937_64 random(GetParam());
  const auto tiny = support::random_tiny_model(random);
  const TempDir dir;
  support::write_tiny_model(tiny, dir / "hf", GetParam());
  const auto checkpoint = open(dir / "hf");
  expect_loads(checkpoint, NaiveWeights(dir / "hf", checkpoint.map.config),
               random_mesh(tiny, random));
}

INSTANTIATE_TEST_SUITE_P(Seeds, LoadOntoARandomMesh, testing::Range<std::uint64_t>(0, 150));

// The real checkpoints of tests/data, each in the forms in which it lies there.
struct Stored {
  std::string_view hf{};
  std::vector<std::string_view> others{};
};

const Stored kStored[] = {
    {"hf_llama",
     {"llama_tp1", "llama_tp2pp2", "llama_tp2pp2_local", "llama_tp2pp2_mc0131",
      "llama_tp2pp2_mc0161", "llama_singleton", "legacy/llama_legacy_tp2pp2",
      "legacy/llama_legacy_local_pp2", "zarr/llama_zarr_tp2pp2"}},
    {"hf_qwen2", {"qwen2"}},
    {"hf_qwen2_tied", {"qwen2_tied_pp2", "legacy/qwen2_tied_legacy_pp2"}},
    {"hf_qwen3", {"qwen3"}},
    {"hf_mixtral",
     {"mixtral_ep2", "mixtral_ep2_mc0161", "mixtral_ep2_seqmlp", "mixtral_singleton",
      "legacy/mixtral_legacy_ep2", "legacy/mixtral_legacy_local_ep2", "zarr/mixtral_zarr_ep2"}},
    {"hf_qwen2_moe", {"qwen2moe_tp2", "legacy/qwen2moe_legacy_tp2ep2"}},
    {"hf_qwen3_moe", {"qwen3moe_ep2"}},
    {"hf_deepseek_v2", {}},
    {"hf_deepseek_v3",
     {"deepseek_v3_ep2", "deepseek_v3_ep2_mc0161", "deepseek_v3_tp2pp2",
      "legacy/deepseek_v3_legacy_tp2pp2"}},
    {"hf_moonlight", {"moonlight_tp1"}},
};

class LoadOfAStoredModel : public testing::TestWithParam<Stored> {};

TEST_P(LoadOfAStoredModel, GivesTheSameBytesFromEveryFormatOnEveryMesh) {
  const auto& [hf, others] = GetParam();
  const auto folder = test_data(hf) / "hf";
  std::vector<Checkpoint> checkpoints{open(folder)};
  for (const auto& other : others)
    checkpoints.push_back(open(test_data(other), {.hf_config = folder}));
  for (const auto& checkpoint : checkpoints) {
    SCOPED_TRACE(checkpoint.location.folder.string());
    const NaiveWeights weights(folder, checkpoint.map.config);
    for (const auto& mesh : support::meshes_for(checkpoint.map.config))
      ASSERT_NO_FATAL_FAILURE(expect_loads(checkpoint, weights, mesh));
  }
}

INSTANTIATE_TEST_SUITE_P(Models,
                         LoadOfAStoredModel,
                         testing::ValuesIn(kStored),
                         [](const auto& one) { return std::string(one.param.hf); });

TEST(Load, WidensExactlyAndNarrowsOnlyWhenAsked) {
  const TempDir dir;
  support::write_tiny_model({.dtype = DType::kF32, .norm_dtype = DType::kF32}, dir / "hf", 1);
  const auto checkpoint = open(dir / "hf");
  const ParallelModel model(checkpoint.map, checkpoint.tensors, {.dtype = DType::kBF16});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"would be rounded in bf16", "while copying", "loading"},
                    [&] { load_rank(checkpoint, model, 0); }));
  load_rank(checkpoint, model, 0, {.round = true});
  const NaiveWeights weights(dir / "hf", checkpoint.map.config);
  support::expect_holds(model.sharded_state_dict(0), weights);
}

TEST(Load, KeepsTheRoutersBiasInFp32) {
  const auto checkpoint = open(test_data("hf_deepseek_v3") / "hf");
  const ParallelModel model(checkpoint.map, checkpoint.tensors, {.dtype = {}});
  const auto& shards = model.sharded_state_dict(0);
  const auto biases = std::ranges::count_if(shards, [](const LocalShard& shard) {
    return shard.tensor.key.ends_with("expert_bias") && shard.tensor.dtype == DType::kF32;
  });
  EXPECT_GT(biases, 0);
  EXPECT_NO_THROW(load_rank(checkpoint, model, 0));
}

// A Megatron checkpoint whose vocabulary's padding holds something.
struct Padded {
  TempDir dir;
  Padded() {
    support::write_tiny_model({.vocab = 50}, dir / "hf", 1);
    convert({.from = dir / "hf",
             .to = dir / "megatron",
             .parallel = {.make_vocab_size_divisible_by = 64}});
    const auto written = open(dir / "megatron");
    const auto embedding = written.layout.find("embedding.word_embeddings.weight");
    const auto& shard = written.layout.tensor(*embedding).shards.front();
    const auto* path = distckpt::file_of(written.layout.storages()[shard.at.storage]);
    support::corrupt(*path, shard.at.offset + 60 * shard.at.strides[0]);
  }
  static ParallelModel model(const Checkpoint& checkpoint) {
    return {checkpoint.map,
            checkpoint.tensors,
            {.parallel = {.make_vocab_size_divisible_by = 64}, .dtype = {}}};
  }
  static std::byte padding_of(const ParallelModel& model) {
    for (const auto& shard : model.sharded_state_dict(0)) {
      if (shard.tensor.key.starts_with("embedding."))
        return packed_bytes(shard)[static_cast<std::size_t>(60 * shard.tensor.local_shape[1] * 2)];
    }
    return {};
  }
};

TEST(Load, FillsPaddingWithZerosAndSaysWhatItDropped) {
  const Padded padded;
  auto checkpoint = open(padded.dir / "megatron");
  checkpoint.checksums.clear();  // which would notice
  const auto model = Padded::model(checkpoint);
  const auto report = load_rank(checkpoint, model, 0);
  EXPECT_EQ(Padded::padding_of(model), std::byte{0});
  ASSERT_FALSE(report.nonzero_padding.empty());
  EXPECT_EQ(report.nonzero_padding[0].tensor, "embedding.word_embeddings.weight");
}

TEST(Load, KeepsPaddingThatBothHaveWhenAsked) {
  const Padded padded;
  auto checkpoint = open(padded.dir / "megatron");
  checkpoint.checksums.clear();
  const auto model = Padded::model(checkpoint);
  EXPECT_TRUE(load_rank(checkpoint, model, 0, {.keep_padding = true, .threads = 1})
                  .nonzero_padding.empty());
  EXPECT_EQ(Padded::padding_of(model), std::byte{0xFF});
}

// --- Models of another configuration ---

TEST(Load, LeavesPredictionLayersBehindWhereTheModelHasNone) {
  const TempDir dir;
  support::write_tiny_model({.family = "deepseek_v3", .prediction_layers = 1}, dir / "hf", 1);
  const auto checkpoint = open(dir / "hf");
  auto config = checkpoint.map.config;
  config.mtp_num_layers = 0;
  const auto map = make_model_map(config);
  const ParallelModel model(map, map.tensors, {.dtype = {}});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"mtp.layers.0", "is missing"},
                    [&] { load_rank(checkpoint, model, 0); }));
  const auto report = load_rank(checkpoint, model, 0, {.config = config, .threads = 1});
  EXPECT_TRUE(std::ranges::all_of(report.left_behind, [](const std::string& name) {
    return name.starts_with("model.layers.2.");
  }));
  EXPECT_GT(report.left_behind.size(), 10U);
  const NaiveWeights weights(dir / "hf", config);
  support::expect_holds(model.sharded_state_dict(0), weights);
}

TEST(Load, GivesAModelWithAnotherHeadItsBodyAndAHeadOfZeros) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  const auto checkpoint = open(dir / "hf");
  auto config = checkpoint.map.config;
  config.head = models::Head::kTokenClassification;
  config.num_labels = 1;
  const auto map = make_model_map(config);
  const ParallelModel model(map, map.tensors, {.dtype = {}});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"lm_head.weight", "no place for it"},
                    [&] { load_rank(checkpoint, model, 0, {.config = config, .threads = 1}); }));
  const auto report =
      load_rank(checkpoint, model, 0, {.config = config, .new_head = true, .threads = 1});
  EXPECT_EQ(report.left_behind, std::vector<std::string>{"lm_head.weight"});
  EXPECT_EQ(report.from_zero, (std::vector<std::string>{"score.weight", "score.bias"}));
  const NaiveWeights weights(dir / "hf", config);
  for (const auto& shard : model.sharded_state_dict(0)) {
    const auto found = packed_bytes(shard);
    const bool head = shard.tensor.key.starts_with("output_layer");
    EXPECT_TRUE(same_bytes(
        head ? std::vector<std::byte>(found.size()) : weights.expected(shard.tensor), found))
        << shard.tensor.key;
  }
}

TEST(Load, TakesTheHeadOfACheckpointThatHasTheSameOne) {
  const TempDir dir;
  support::write_tiny_model({.head = "Token"}, dir / "hf", 1);
  const auto checkpoint = open(dir / "hf");
  expect_loads(checkpoint, NaiveWeights(dir / "hf", checkpoint.map.config), {.dtype = {}});
}

TEST(Load, RefusesAModelOfOtherLayers) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  const auto checkpoint = open(dir / "hf");
  auto config = checkpoint.map.config;
  const auto try_config = [&] {
    const auto map = make_model_map(config);
    const ParallelModel model(map, map.tensors, {.dtype = {}});
    load_rank(checkpoint, model, 0, {.config = config, .threads = 1});
  };
  config.num_layers = 3;
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"model.layers.2.", "does not hold it"}, try_config));
  config.num_layers = 1;
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"model.layers.1.", "no place for it"}, try_config));
  config.num_layers = 2;
  config.ffn_hidden_size = 32;
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"mlp.gate_proj.weight", "[24, 16]", "[32, 16]"}, try_config));
}

// --- Faults ---

struct Tiny {
  TempDir dir;
  Checkpoint checkpoint;
  ParallelModel model;

  explicit Tiny(const TinyModel& tiny = {})
      : checkpoint([&] {
          support::write_tiny_model(tiny, dir / "hf", 1);
          return open(dir / "hf");
        }()),
        model(checkpoint.map,
              checkpoint.tensors,
              {.parallel = {.tensor_model_parallel_size = 2}, .dtype = {}}) {}

  // The mesh as rank 0 sees it, after a change to what each rank says.
  distckpt::MeshLayout changed(
      const std::function<void(std::vector<distckpt::ShardedTensor>&)>& change) const {
    auto ranks = model.mesh(0).ranks;
    for (auto& tensors : ranks) change(tensors);
    ranks.emplace_back();  // that of a rank which holds nothing
    const auto last = static_cast<int>(ranks.size()) - 1;
    return distckpt::make_mesh_layout(std::move(ranks), last, {});
  }
};

TEST(Load, NamesATensorThatTheModelLacks) {
  const Tiny tiny;
  const std::string lost = "decoder.layers.1.mlp.linear_fc2.weight";
  const auto mesh = tiny.changed([&](std::vector<distckpt::ShardedTensor>& tensors) {
    std::erase_if(tensors, [&](const auto& tensor) { return tensor.key == lost; });
  });
  EXPECT_TRUE(fails(ErrorKind::kLayout, {lost, "is missing", "model.layers.1.mlp.down_proj.weight"},
                    [&] { plan_load(tiny.checkpoint, mesh); }));
}

TEST(Load, NamesATensorThatTheCheckpointLacks) {
  const Tiny tiny;
  const auto mesh = tiny.changed([&](std::vector<distckpt::ShardedTensor>& tensors) {
    tensors.push_back({.key = "decoder.layers.0.adapter.weight",
                       .local_shape = {0, 4},
                       .global_shape = {0, 4},
                       .global_offset = {0, 0}});
  });
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"decoder.layers.0.adapter.weight", "no rule"},
                    [&] { plan_load(tiny.checkpoint, mesh); }));
}

TEST(Load, NamesATensorOfAnotherShape) {
  const Tiny tiny;
  auto mesh = tiny.model.mesh(0);
  mesh.layout.tensor(*mesh.layout.find("decoder.final_layernorm.weight")).shape = {17};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"decoder.final_layernorm.weight", "[17]", "[16]"},
                    [&] { plan_load(tiny.checkpoint, mesh); }));
}

TEST(Load, NamesAFileThatBecameShorter) {
  const Tiny tiny;
  const auto file = tiny.dir / "hf" / "model.safetensors";
  support::cut(file, static_cast<std::int64_t>(fs::file_size(file)) - 1);
  EXPECT_TRUE(fails(ErrorKind::kIo, {"model.safetensors", "was changed by someone", "loading"},
                    [&] { load_rank(tiny.checkpoint, tiny.model, 1); }));
}

TEST(Load, ReportsBytesThatDoNotHaveTheirChecksum) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  convert({.from = dir / "hf", .to = dir / "megatron"});
  {
    const auto whole = open(dir / "megatron");
    const auto norm = *whole.layout.find("decoder.final_layernorm.weight");
    const auto& shard = whole.layout.tensor(norm).shards.front();
    support::corrupt(*distckpt::file_of(whole.layout.storages()[shard.at.storage]),
                     shard.at.offset + 3);
  }
  const auto checkpoint = open(dir / "megatron");
  const ParallelModel model(checkpoint.map, checkpoint.tensors, {.dtype = {}});
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"decoder.final_layernorm.weight", "CRC-32"},
                    [&] { load_rank(checkpoint, model, 0); }));
}

TEST(Load, ReadsASecondCopyUnlessItDiffers) {
  const Tiny tiny({.tied = true, .repeat_tied_head = true});
  const auto report = load_rank(tiny.checkpoint, tiny.model, 0);
  EXPECT_EQ(report.second_copies, std::vector<std::string>{"model.embed_tokens.weight"});
  const auto& layout = tiny.checkpoint.layout;
  const auto& head = layout.tensor(*layout.find("lm_head.weight")).shards.front();
  support::corrupt(tiny.dir / "hf" / "model.safetensors", head.at.offset);
  const auto again = open(tiny.dir / "hf");  // of a model whose ends are two
  EXPECT_TRUE(again.untied);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"output_layer.weight", "lm_head.weight"},
                    [&] { load_rank(again, tiny.model, 1); }));
}

}  // namespace load_test
}  // namespace ferry::converter
