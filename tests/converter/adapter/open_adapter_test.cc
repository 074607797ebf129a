// Adapters of PEFT, verl and Megatron-Bridge as sources: what they change, and what is refused.
#include "converter/adapter/open_adapter.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "converter/adapter/convert_adapter.h"
#include "converter/convert.h"
#include "distckpt/base/error.h"
#include "tests/converter/adapter/peft_files.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace open_adapter_test {

namespace fs = std::filesystem;
using peft_files::Factors;
using peft_files::random_factors;
using peft_files::tensors_of;
using peft_files::write_files;
using peft_files::write_peft;
using support::fails;
using support::stored_tensor;

const std::string kAttention = "model.layers.0.self_attn.";

// The base: hidden size 16, feed-forward size 24, 4 heads and 2 groups of 4 channels.
class OpenAdapter : public testing::Test {
 protected:
  OpenAdapter() {
    support::write_tiny_model({}, dir_ / "base", 3);
    base_ = open(dir_ / "base");
  }
  Adapter opened(const char* name = "adapter", const OpenAdapterOptions& options = {}) {
    return open_adapter(dir_ / name, base_, options);
  }
  // Query, key and value; their first factors are one with `shared`.
  static std::vector<Factors> attention(bool shared) {
    std::vector all{random_factors(kAttention + "q_proj", 16, 16, 1),
                    random_factors(kAttention + "k_proj", 8, 16, 3),
                    random_factors(kAttention + "v_proj", 8, 16, 5)};
    if (shared) all[1].right = all[2].right = all[0].right;
    return all;
  }
  // An adapter and one tensor that is no factor of it.
  void write_with(const support::StoredTensor& other, const std::string& more) {
    auto tensors = tensors_of({random_factors(kAttention + "q_proj", 16, 16, 1)});
    tensors.push_back(other);
    write_files(dir_ / "adapter", tensors, 2, more);
  }
  testing::AssertionResult refuses(ErrorKind kind,
                                   const std::vector<std::string_view>& words,
                                   const OpenAdapterOptions& options = {}) {
    return fails(kind, words, [&] { opened("adapter", options); });
  }

  support::TempDir dir_;
  Checkpoint base_;
};

TEST_F(OpenAdapter, HasTheParametersThatItChangesAndTheirScaling) {
  write_peft(dir_ / "adapter", attention(false));
  const auto adapter = opened();
  EXPECT_EQ(adapter.form, AdapterForm::kPeft);
  ASSERT_EQ(adapter.adapted.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(base_.map.megatron[adapter.adapted[i].megatron].key,
              "decoder.layers.0.self_attention.linear_qkv.weight");
    EXPECT_EQ(adapter.adapted[i].part, static_cast<int>(i));
    EXPECT_EQ(adapter.adapted[i].rank, 2);
    EXPECT_EQ(adapter.scaling[i], 2.0F);  // lora_alpha 4, of rank 2
  }
  EXPECT_EQ(adapter.checkpoint.tensors.size(), 6U);
  EXPECT_EQ(adapter.checkpoint.links.links.size(), 6U);
}

TEST_F(OpenAdapter, IsFusedForMegatronWhereFirstFactorsAreShared) {
  write_peft(dir_ / "adapter", attention(true));
  const auto fused = opened("adapter", {.megatron_tp = 2});
  EXPECT_FALSE(fused.canonical);
  ASSERT_EQ(fused.adapted.size(), 2U);
  EXPECT_EQ(fused.adapted[0].part, AdaptedParameter::kFused);
  EXPECT_EQ(fused.adapted[0].tp, 2);
  EXPECT_TRUE(opened().canonical);  // of another target each keeps its own
}

TEST_F(OpenAdapter, IsCanonicalForMegatronWhereFirstFactorsDiffer) {
  write_peft(dir_ / "adapter", attention(false));
  const auto adapter = opened("adapter", {.megatron_tp = 2});
  EXPECT_TRUE(adapter.canonical);
  EXPECT_EQ(adapter.adapted.size(), 6U);
}

// Ranks 2 and 4 of query and output.
std::vector<Factors> of_two_ranks() {
  auto output = random_factors(kAttention + "o_proj", 16, 16, 3);
  output.rank = 4;
  output.right = peft_files::small_integers(64, 3);
  output.left = peft_files::small_integers(64, 4);
  return {random_factors(kAttention + "q_proj", 16, 16, 1), output};
}

std::vector<std::int64_t> ranks_of(const Adapter& adapter) {
  std::vector<std::int64_t> ranks;
  for (const auto& one : adapter.adapted) ranks.push_back(one.rank);
  return ranks;
}

TEST_F(OpenAdapter, HasOneRankWhereFactorsAreEqual) {
  write_peft(dir_ / "adapter", of_two_ranks(),
             R"(, "rank_pattern": {"o_proj": 4}, "alpha_pattern": {"o_proj": 8})");
  EXPECT_EQ(ranks_of(opened()), (std::vector<std::int64_t>{2, 4}));
  EXPECT_EQ(ranks_of(opened("adapter", {.one_rank = true})), (std::vector<std::int64_t>{4, 4}));
}

TEST_F(OpenAdapter, KeepsRanksWhereFactorsDiffer) {
  write_peft(dir_ / "adapter", of_two_ranks(), R"(, "rank_pattern": {"o_proj": 4})");
  EXPECT_EQ(ranks_of(opened("adapter", {.one_rank = true})), (std::vector<std::int64_t>{2, 4}));
}

TEST_F(OpenAdapter, NamesFactorsOfTwoRanks) {
  auto tensors = tensors_of(of_two_ranks());
  auto& right = tensors.front();  // of the query, whose other factor has rank 2
  right = stored_tensor(right.name, {1, 16}, peft_files::small_integers(16, 1));
  write_files(dir_ / "adapter", tensors, 2, R"(, "rank_pattern": {"o_proj": 4})");
  EXPECT_TRUE(refuses(ErrorKind::kCorrupt, {"q_proj", "[1, 16]", "[16, 2]", "no common rank"},
                      {.one_rank = true}));
}

TEST_F(OpenAdapter, HasAllOfAModuleInAllLayersForMegatron) {
  write_peft(dir_ / "adapter", {random_factors(kAttention + "q_proj", 16, 16, 1)});
  const auto adapter = opened("adapter", {.megatron_tp = 1});
  EXPECT_EQ(adapter.adapted.size(), 3U * static_cast<std::size_t>(base_.map.config.num_layers));
  EXPECT_EQ(adapter.scaling.size(), adapter.adapted.size());
  EXPECT_EQ(opened().adapted.size(), 1U);
}

TEST_F(OpenAdapter, FindsVerlsInAFolderOfACheckpoint) {
  write_peft(dir_ / "run" / kVerlAdapter, attention(false));
  EXPECT_EQ(opened("run").form, AdapterForm::kVerl);
}

TEST_F(OpenAdapter, TakesTensorsAlongThatWereTrainedWhole) {
  write_with(stored_tensor("base_model.model.model.norm.weight", {16}, std::vector<float>(16)),
             R"(, "modules_to_save": ["norm"])");
  const auto adapter = opened();
  EXPECT_TRUE(adapter.checkpoint.map.index.contains("base_model.model.model.norm.weight"));
  EXPECT_EQ(adapter.adapted.size(), 1U);
  EXPECT_TRUE(refuses(ErrorKind::kLayout,
                      {"model.norm.weight: is no factor of a linear layer", "Megatron-Bridge"},
                      {.megatron_tp = 1}));
}

TEST_F(OpenAdapter, NamesATrainedTensorThatTheBaseHasNot) {
  write_with(stored_tensor("base_model.model.score.weight", {1, 16}, std::vector<float>(16)),
             R"(, "modules_to_save": ["score"])");
  EXPECT_TRUE(refuses(ErrorKind::kLayout, {"score.weight", "the base has no such tensor"}));
}

TEST_F(OpenAdapter, NamesATrainedTensorOfAnotherShape) {
  write_with(stored_tensor("base_model.model.model.norm.weight", {8}, std::vector<float>(8)),
             R"(, "modules_to_save": ["norm"])");
  EXPECT_TRUE(refuses(ErrorKind::kLayout, {"model.norm.weight", "[8]", "the base's is", "[16]"}));
}

TEST_F(OpenAdapter, RefusesAMagnitudeWithoutFactors) {
  write_with(stored_tensor("base_model.model." + kAttention + "k_proj.lora_magnitude_vector", {8},
                           std::vector<float>(8)),
             R"(, "use_dora": true)");
  EXPECT_TRUE(refuses(ErrorKind::kCorrupt, {"k_proj", "its factors are missing"}));
}

TEST_F(OpenAdapter, RefusesDoraWithoutMagnitudes) {  // as Megatron-Bridge exports it
  write_peft(dir_ / "adapter", attention(false), R"(, "use_dora": true)");
  EXPECT_TRUE(refuses(ErrorKind::kLayout, {"use_dora is set, but 0 of 3 modules have magnitudes"}));
}

TEST_F(OpenAdapter, RefusesAFactorThatIsNoMatrix) {
  write_with(stored_tensor("base_model.model." + kAttention + "k_proj.lora_A.weight", {32},
                           std::vector<float>(32)),
             "");
  EXPECT_TRUE(refuses(ErrorKind::kLayout, {"k_proj.lora_A", "expected a matrix"}));
}

TEST_F(OpenAdapter, RefusesOneThatChangesNothing) {
  write_files(dir_ / "adapter", {}, 2);
  EXPECT_TRUE(refuses(ErrorKind::kCorrupt, {"changes nothing"}));
}

TEST_F(OpenAdapter, RefusesACheckpointThatIsNoAdapter) {
  EXPECT_TRUE(fails(ErrorKind::kLayout,
                    {"base", "expected an adapter of PEFT or verl, or one of Megatron-Bridge"},
                    [&] { opened("base"); }));
  convert({.from = dir_ / "base", .to = dir_ / "megatron"});
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"megatron", "holds no factors of an adapter"},
                    [&] { opened("megatron"); }));
}

// An adapter of Megatron-Bridge.
class OpenMegatronAdapter : public OpenAdapter {
 protected:
  void write(const std::vector<Factors>& factors, int tp) {
    write_peft(dir_ / "peft", factors);
    convert_adapter({.from = dir_ / "peft",
                     .to = dir_ / "adapter",
                     .base = dir_ / "base",
                     .form = AdapterForm::kMegatron,
                     .parallel = {.tensor_model_parallel_size = tp}});
  }
  void forget_alpha() {
    for (const auto& file : fs::recursive_directory_iterator(dir_ / "adapter"))
      if (file.path().filename() == "run_config.yaml") configs_.push_back(file.path());
    for (const auto& config : configs_) fs::remove(config);
  }

  std::vector<fs::path> configs_;
};

TEST_F(OpenMegatronAdapter, ReadsItsAlphaBesideIt) {
  write(attention(true), 1);
  const auto adapter = opened();
  EXPECT_EQ(adapter.form, AdapterForm::kMegatron);
  EXPECT_FALSE(adapter.canonical);
  ASSERT_EQ(adapter.adapted.size(), 2U);
  EXPECT_EQ(adapter.adapted[0].part, AdaptedParameter::kFused);
  EXPECT_EQ(adapter.scaling[0], 2.0F);
  EXPECT_TRUE(adapter.checkpoint.megatron_names);
}

TEST_F(OpenMegatronAdapter, KnowsTheRanksThatSavedCanonicalFactors) {
  write(attention(false), 2);
  const auto adapter = opened();
  EXPECT_TRUE(adapter.canonical);
  ASSERT_EQ(adapter.adapted.size(), 6U);
  EXPECT_EQ(adapter.adapted[0].tp, 2);
}

TEST_F(OpenMegatronAdapter, KnowsTheRanksThatSavedTwoHalvesOfGateEach) {
  const std::string mlp = "model.layers.0.mlp.";
  write({random_factors(mlp + "gate_proj", 24, 16, 1), random_factors(mlp + "up_proj", 24, 16, 3)},
        2);
  const auto adapter = opened();
  EXPECT_TRUE(adapter.canonical);
  ASSERT_EQ(adapter.adapted.size(), 4U);
  EXPECT_EQ(adapter.adapted[0].tp, 2);
  EXPECT_EQ(adapter.adapted[1].tp, 2);
}

TEST_F(OpenMegatronAdapter, IsToldItsAlphaWhereItDoesNotSayIt) {
  write(attention(true), 1);
  forget_alpha();
  ASSERT_FALSE(configs_.empty());
  EXPECT_TRUE(
      refuses(ErrorKind::kLayout,
              {"neither a run_config.yaml nor a lora_train_meta.json says the adapter's alpha",
               "--lora-alpha"}));
  EXPECT_EQ(opened("adapter", {.alpha = 3}).scaling.at(0), 1.5F);
}

TEST_F(OpenMegatronAdapter, TakesAlphaFromVerlsRecordWhereItDoesNotSayIt) {
  write(attention(true), 1);
  const auto record = dir_ / "adapter" / "iter_0000000" / kVerlLoraRecord;
  distckpt::write_text(record, R"({"r": 2, "lora_alpha": 5})");
  EXPECT_EQ(opened().scaling.at(0), 2.0F);  // its own
  forget_alpha();
  EXPECT_EQ(opened().scaling.at(0), 2.5F);
  EXPECT_EQ(opened("adapter", {.alpha = 3}).scaling.at(0), 1.5F);
  distckpt::write_text(record, R"({"r": 2, "lora_alpha": 0})");
  EXPECT_TRUE(refuses(ErrorKind::kLayout, {"lora_train_meta.json", "--lora-alpha"}));
}

TEST_F(OpenMegatronAdapter, IsNoModel) {
  write(attention(true), 1);
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"holds a LoRA adapter without a model", "ferry merge"},
                    [&] { open(dir_ / "adapter"); }));
}

TEST_F(OpenMegatronAdapter, TakesAlphaFromTheSectionOfPeftAlone) {
  write(attention(true), 1);
  forget_alpha();
  for (const auto& config : configs_)
    distckpt::write_text(config, "model:\n  alpha: 7\npeft:\n  dim: 2\n  alpha: 6\nother:\n");
  EXPECT_EQ(opened().scaling.at(0), 3.0F);
}

TEST(AdapterForm, IsNamedAsOnTheCommandLine) {
  EXPECT_EQ(adapter_form("peft"), AdapterForm::kPeft);
  EXPECT_EQ(adapter_form("verl"), AdapterForm::kVerl);
  EXPECT_EQ(adapter_form("megatron"), AdapterForm::kMegatron);
  EXPECT_EQ(adapter_form("vllm"), AdapterForm::kVllm);
  EXPECT_EQ(adapter_form("sglang"), AdapterForm::kVllm);
  EXPECT_FALSE(adapter_form("PEFT"));
  EXPECT_EQ(form_name(AdapterForm::kMegatron), "Megatron-Bridge");
}

}  // namespace open_adapter_test
}  // namespace ferry::converter
