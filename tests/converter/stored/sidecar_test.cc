#include "converter/stored/sidecar.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace sidecar_test {

namespace fs = std::filesystem;
using support::fails;

class Sidecar : public testing::Test {
 protected:
  void SetUp() override {
    support::write_tiny_model({.num_files = 2}, dir_ / "hf", 1);
    form_ = read_hf_folder(dir_ / "hf", Links::kAll);
    fs::create_directory(dir_ / "iteration");
  }
  void write(bool keep_headers) const {
    write_sidecar(dir_ / "iteration", form_, keep_headers,
                  {{"model.norm.weight", distckpt::DType::kBF16}},
                  {{"model.layers.0.mlp.experts.gate_up_proj", {4, 6, 8}}});
  }
  HfForm read() const { return *read_sidecar(dir_ / "iteration", Links::kInside); }
  fs::path file(std::string_view name) const { return dir_ / "iteration" / "ferry" / name; }

  support::TempDir dir_;
  HfForm form_;
};

TEST_F(Sidecar, GivesBackTheFormThatWasWritten) {
  write(true);
  const auto form = read();
  EXPECT_EQ(form.carried, form_.carried);
  EXPECT_EQ(form.config_text(), form_.config_text());
  EXPECT_EQ(form.index_text, form_.index_text);
  ASSERT_EQ(form.headers.size(), 2U);
  EXPECT_EQ(form.headers[1].prefix, form_.headers[1].prefix);
  EXPECT_EQ(form.dtypes.at("model.norm.weight"), distckpt::DType::kBF16);
  EXPECT_TRUE(form.shapes.empty());  // which the headers tell
}

TEST_F(Sidecar, LeavesHeadersAwayThatAreNotToBeKept) {
  write(false);
  EXPECT_TRUE(read().headers.empty());
  EXPECT_FALSE(read().index_text.has_value());
}

TEST_F(Sidecar, TellsShapesWhereItKeepsNoHeaders) {
  write(false);
  EXPECT_EQ(read().find("model.layers.0.mlp.experts.gate_up_proj"), (distckpt::Shape{4, 6, 8}));
  EXPECT_EQ(read().find("model.layers.0.mlp.experts.down_proj"), std::nullopt);
}

TEST_F(Sidecar, KeepsThePart) {
  form_.part = {{.include = {"model.norm.*"}}};
  write(true);
  EXPECT_EQ(read().part, form_.part);
}

TEST_F(Sidecar, OfAnIterationThatHasNoneIsNothing) {
  EXPECT_FALSE(read_sidecar(dir_ / "iteration", Links::kAll).has_value());
}

TEST_F(Sidecar, NamesAFileThatWasChanged) {
  write(true);
  support::append(file("hf/tokenizer.json"), " ");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt,
                    {"hf/tokenizer.json: is not as it was written", "--hf-config"},
                    [&] { read(); }));
}

TEST_F(Sidecar, NamesAFileThatIsMissing) {
  write(true);
  fs::remove(file("hf/tokenizer.json"));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"hf/tokenizer.json: is missing"}, [&] { read(); }));
}

TEST_F(Sidecar, NamesAFileThatWasAdded) {
  write(true);
  distckpt::write_text(file("hf/extra.json"), "{}");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"does not list hf/extra.json"}, [&] { read(); }));
}

TEST_F(Sidecar, RefusesAnIndexThatWasChanged) {
  write(true);
  auto index = distckpt::read_text(file("sidecar.json"));
  index.replace(index.find("BF16"), 4, "F16 ");
  distckpt::write_text(file("sidecar.json"), index);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"sidecar.json"}, [&] { read(); }));
}

TEST(SidecarFiles, RefuseANameThatHoldsWeights) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"hf/other.safetensors", "holds weights"}, [] {
    form_of_sidecar({{"hf/config.json", "{}"}, {"hf/other.safetensors", ""}}, "folder");
  }));
}

}  // namespace sidecar_test
}  // namespace ferry::converter
