#include "converter/stored/hf_folder.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace hf_folder_test {

namespace fs = std::filesystem;
using support::fails;

class HfFolder : public testing::Test {
 protected:
  void SetUp() override { support::write_tiny_model({.num_files = 2}, dir_ / "hf", 1); }
  HfForm read(Links links = Links::kInside) const { return read_hf_folder(dir_ / "hf", links); }
  fs::path file(std::string_view name) const { return dir_ / "hf" / name; }

  support::TempDir dir_;
};

TEST_F(HfFolder, CarriesEverythingButWeights) {
  const auto form = read();
  EXPECT_EQ(form.carried,
            (std::vector<std::string>{"config.json", "generation_config.json", "tokenizer.json"}));
  EXPECT_EQ(form.headers.size(), 2U);
}

TEST_F(HfFolder, NamesAFileThatTheIndexNamesAndThatIsNotThere) {
  fs::remove(file("model-00002-of-00002.safetensors"));
  EXPECT_TRUE(fails(ErrorKind::kNotFound,
                    {"model.safetensors.index.json", "model-00002-of-00002.safetensors"},
                    [&] { read(); }));
}

TEST_F(HfFolder, NamesATensorThatIsInAnotherFileThanTheIndexSays) {
  auto index = distckpt::read_text(file("model.safetensors.index.json"));
  const std::string name = "\"model.norm.weight\": \"model-0000";
  const auto at = index.find(name) + name.size();
  index[at] = index[at] == '1' ? '2' : '1';
  distckpt::write_text(file("model.safetensors.index.json"), index);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"index.json", "model.norm.weight"}, [&] { read(); }));
}

TEST_F(HfFolder, SeveralFilesWantAnIndex) {
  fs::remove(file("model.safetensors.index.json"));
  EXPECT_TRUE(
      fails(ErrorKind::kNotFound, {"holds 2 safetensors files", "incomplete"}, [&] { read(); }));
}

TEST_F(HfFolder, RefusesWeightsThatTransformersWouldNotLoad) {
  fs::copy_file(file("model-00001-of-00002.safetensors"), file("model.safetensors"));
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"model.safetensors", "transformers loads"}, [&] { read(); }));
}

TEST_F(HfFolder, ReadsTheModelAndNoFileBesideIt) {
  support::write_tiny_model({}, dir_ / "one", 1);
  for (const auto* stray : {"adapter_model", "consolidated", "model.fp16"}) {
    fs::copy_file(file("model-00001-of-00002.safetensors"),
                  dir_ / "one" / (std::string(stray) + ".safetensors"));
  }
  const auto form = read_hf_folder(dir_ / "one", Links::kInside);
  ASSERT_EQ(form.headers.size(), 1U);
  EXPECT_EQ(form.headers.front().filename, "model.safetensors");
  EXPECT_EQ(loaded_weights(dir_ / "one"), "model.safetensors");
}

TEST_F(HfFolder, RefusesALinkThatLeadsOutside) {
  distckpt::write_text(dir_ / "letter.txt", "dear");
  fs::create_symlink(dir_ / "letter.txt", file("letter.txt"));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"letter.txt"}, [&] { read(); }));
  EXPECT_EQ(read(Links::kAll).text("letter.txt"), "dear");
}

TEST_F(HfFolder, NamesALinkThatLeadsNowhere) {
  fs::create_symlink("nowhere", file("letter.txt"));
  EXPECT_TRUE(
      fails(ErrorKind::kNotFound, {"letter.txt", "symbolic link to nowhere"}, [&] { read(); }));
}

TEST_F(HfFolder, ForHfConfigHasTheDtypesOfWeights) {
  const auto form = read_hf_config(dir_ / "hf", Links::kAll);
  EXPECT_TRUE(form.headers.empty());
  EXPECT_EQ(form.dtypes.at("model.norm.weight"), distckpt::DType::kBF16);
}

TEST_F(HfFolder, LeavesAConfigurationThatIsNotQuantisedAsItIs) {
  auto form = read();
  form.leave_quantization();
  EXPECT_EQ(form.headers.size(), 2U);
  EXPECT_TRUE(form.contents.empty());
}

TEST_F(HfFolder, LeavesQuantizationWithItsHeaders) {
  auto config = distckpt::read_text(file("config.json"));
  config.insert(config.find('{') + 1,
                R"("quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
                    "activation_scheme": "dynamic", "weight_block_size": [128, 128]},)");
  distckpt::write_text(file("config.json"), config);
  auto form = read();
  form.leave_quantization();
  EXPECT_EQ(form.config_text().find("quantization_config"), std::string::npos);
  EXPECT_TRUE(form.headers.empty());
  EXPECT_FALSE(form.index_text.has_value());
}

TEST(Travels, WeightsAndHiddenFilesStay) {
  EXPECT_TRUE(travels("tokenizer.json"));
  EXPECT_FALSE(travels("model.safetensors"));
  EXPECT_FALSE(travels("pytorch_model.bin.index.json"));
  EXPECT_FALSE(travels(".gitattributes"));
  EXPECT_FALSE(travels("ferry-part.json"));
}

}  // namespace hf_folder_test
}  // namespace ferry::converter
