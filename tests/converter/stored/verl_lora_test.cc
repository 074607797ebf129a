// Names that PEFT gives to tensors, and the record that verl saves of an adapter.
#include "converter/stored/verl_lora.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace verl_lora_test {

namespace fs = std::filesystem;
using support::fails;

class LoraRecordFile : public testing::Test {
 protected:
  void write(const fs::path& folder, const std::string& text) {
    fs::create_directories(dir_.path() / folder);
    distckpt::write_text(dir_.path() / folder / kVerlLoraRecord, text);
  }
  std::optional<LoraRecord> found(const fs::path& folder) {
    return find_lora_record({.root = dir_.path() / folder, .folder = dir_.path() / folder});
  }
  testing::AssertionResult refuses(const std::string& text, std::string_view words) {
    write("actor", text);
    return fails(ErrorKind::kCorrupt, {kVerlLoraRecord, words}, [&] { found("actor"); });
  }

  support::TempDir dir_;
};

TEST(VerlLora, TellsFactorsFromTheModelByTheirNames) {
  EXPECT_TRUE(is_lora_factor("base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"));
  EXPECT_TRUE(is_lora_factor("base_model.model.model.embed_tokens.lora_embedding_B.default"));
  EXPECT_FALSE(is_lora_factor("base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"));
  EXPECT_FALSE(is_lora_factor("model.layers.0.mlp.lora_A.weight"));  // of a model without PEFT
}

TEST(VerlLora, NamesTheModelsTensorsAsTheBaseDoes) {
  const auto name = [](std::string_view peft) { return name_in_base(peft, "file"); };
  EXPECT_EQ(name("base_model.model.lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(name("base_model.model.model.layers.3.self_attn.q_proj.base_layer.bias"),
            "model.layers.3.self_attn.q_proj.bias");
  EXPECT_EQ(name("base_model.model.mlp.experts.base_layer.base_layer.down_proj"),
            "mlp.experts.down_proj");
  EXPECT_EQ(name("base_model.model.mlp.base_layers.weight"), "mlp.base_layers.weight");
  EXPECT_EQ(name("model.base_layer.weight"), "model.base_layer.weight");  // without PEFT
}

TEST(VerlLora, NamesATensorThatWasTrainedWhole) {
  EXPECT_TRUE(fails(
      ErrorKind::kLayout, {"file: base_model.model.lm_head.modules_to_save", "trained whole"},
      [] { name_in_base("base_model.model.lm_head.modules_to_save.default.weight", "file"); }));
}

TEST_F(LoraRecordFile, SaysRankAlphaAndTask) {
  write("actor", R"({"r": 8, "lora_alpha": 16, "task_type": "TOKEN_CLS"})");
  const auto record = found("actor");
  ASSERT_TRUE(record);
  EXPECT_EQ(record->rank, 8);
  EXPECT_EQ(record->alpha, 16.0);
  EXPECT_EQ(record->task_type, "TOKEN_CLS");
  EXPECT_EQ(record->source, (dir_ / "actor" / kVerlLoraRecord).string());
}

TEST_F(LoraRecordFile, DoesNotSayNumbersThatAreZeroOrAbsent) {
  for (const auto* text : {R"({"r": 0, "lora_alpha": 0})", "{}", R"({"r": null})"}) {
    write("actor", text);
    const auto record = found("actor");
    ASSERT_TRUE(record) << text;
    EXPECT_FALSE(record->rank) << text;
    EXPECT_FALSE(record->alpha) << text;
    EXPECT_EQ(record->task_type, "CAUSAL_LM") << text;
  }
}

TEST_F(LoraRecordFile, LiesBesideTheFilesOrAboveDistCkptAndModel) {
  const fs::path dist = "step/model/dist_ckpt";
  EXPECT_FALSE(found(dist));
  write("step", R"({"lora_alpha": 1})");
  EXPECT_EQ(found(dist).value().alpha, 1.0);
  EXPECT_EQ(found("step/model").value().alpha, 1.0);
  EXPECT_FALSE(found("step/other"));
  write("step/model", R"({"lora_alpha": 2})");
  EXPECT_EQ(found(dist).value().alpha, 2.0);
  write(dist, R"({"lora_alpha": 3})");
  EXPECT_EQ(found(dist / "").value().alpha, 3.0);
}

TEST_F(LoraRecordFile, IsRefusedWhereItIsNotUnderstood) {
  EXPECT_TRUE(refuses("[1]", "is no object"));
  EXPECT_TRUE(refuses("{", "JSON"));
  EXPECT_TRUE(refuses(R"({"r": "8"})", "r: \"8\" is no number"));
  EXPECT_TRUE(refuses(R"({"r": 1.5})", "r: 1.5 is no rank"));
  EXPECT_TRUE(refuses(R"({"r": -8})", "r: -8 is no rank"));
  EXPECT_TRUE(refuses(R"({"lora_alpha": [8]})", "lora_alpha: [8] is no number"));
  EXPECT_TRUE(refuses(R"({"task_type": 1})", "task_type: 1 is no name"));
}

}  // namespace verl_lora_test
}  // namespace ferry::converter
