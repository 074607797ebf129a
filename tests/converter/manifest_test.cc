#include "converter/manifest.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <ctime>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"

namespace ferry::converter {
namespace manifest_test {

using Lines = std::vector<std::string>;

Manifest example() {
  const auto digest = [](std::string_view text) {
    return distckpt::digest_block(distckpt::as_bytes(text));
  };
  return {.format = "huggingface",
          .model_digest = "0123456789abcdef0123456789abcdef",
          .part = {{.include = {"model.*"}}},
          .tensors = {{.name = "inv_freq",
                       .dtype = distckpt::DType::kF32,
                       .shape = {4},
                       .role = distckpt::Role::kDerived,
                       .digest = digest("inv_freq")},
                      {.name = "model.norm.weight",
                       .dtype = distckpt::DType::kBF16,
                       .shape = {2, 3},
                       .digest = digest("norm")}},
          .files = {{.path = "config.json", .size = 7, .digest = digest("config")}}};
}

TEST(Manifest, IsReadAsItWasWritten) {
  const auto read = parse_manifest(write_manifest(example()), "m");
  EXPECT_EQ(write_manifest(read), write_manifest(example()));
  ASSERT_EQ(read.tensors.size(), 2U);
  EXPECT_EQ(read.tensors[0].role, distckpt::Role::kDerived);
  EXPECT_EQ(read.tensors[1].shape, (distckpt::Shape{2, 3}));
  EXPECT_EQ(read.part, example().part);
  EXPECT_EQ(read.files[0].size, 7);
}

TEST(Manifest, MatchesItself) {
  EXPECT_EQ(compare_manifests(example(), example(), true), Lines{});
}

// A manifest of DeepSeek-V3's tensors took half a minute while an object's end looked through its
// parent.
TEST(Manifest, IsReadAndComparedInTheTimeOfItsLength) {
  constexpr int kTensors = 45'000;
  auto manifest = example();
  auto tensor = manifest.tensors.back();
  manifest.tensors.clear();
  for (int i = 0; i < kTensors; ++i) {
    tensor.name =
        fmt::format("model.layers.{:02}.mlp.experts.{:03}.up_proj.weight", i / 750, i % 750);
    manifest.tensors.push_back(tensor);
  }
  const auto text = write_manifest(manifest);
  const auto begin = std::clock();
  const auto read = parse_manifest(text, "m");
  EXPECT_EQ(compare_manifests(manifest, read, true), Lines{});
  EXPECT_LT((std::clock() - begin) / CLOCKS_PER_SEC, 10) << "seconds of CPU time";
  ASSERT_EQ(read.tensors.size(), kTensors);
  EXPECT_EQ(read.tensors.back().name, tensor.name);
}

TEST(Manifest, NamesATensorThatDiffers) {
  auto found = example();
  found.tensors[1].digest = found.tensors[0].digest;
  const auto lines = compare_manifests(example(), found, true);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("model.norm.weight"), std::string::npos) << lines[0];
}

TEST(Manifest, NamesATensorThatIsMissing) {
  auto found = example();
  found.tensors.pop_back();
  const auto lines = compare_manifests(example(), found, true);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("model.norm.weight"), std::string::npos) << lines[0];
}

TEST(Manifest, DerivedTensorsMayComeAndGo) {
  auto found = example();
  found.tensors.erase(found.tensors.begin());
  EXPECT_EQ(compare_manifests(example(), found, true), Lines{});
}

TEST(Manifest, ComparesFilesIfTold) {
  auto found = example();
  found.files[0].size = 8;
  EXPECT_EQ(compare_manifests(example(), found, true).size(), 1U);
  EXPECT_EQ(compare_manifests(example(), found, false), Lines{});
}

TEST(Manifest, RefusesAnotherFormat) {
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"m: the format is \"x\""},
                             [] { parse_manifest(R"({"format": "x"})", "m"); }));
}

TEST(Manifest, NamesATensorWithoutADigest) {
  auto text = write_manifest(example());
  const auto at = text.find("\"digest\"");
  text.replace(at, 8, "\"other!\"");
  EXPECT_TRUE(
      support::fails(ErrorKind::kCorrupt, {"m: ", "digest"}, [&] { parse_manifest(text, "m"); }));
}

}  // namespace manifest_test
}  // namespace ferry::converter
