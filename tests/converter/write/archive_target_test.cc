#include "converter/write/archive_target.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "converter/convert.h"
#include "converter/digest_checkpoint.h"
#include "converter/inspect.h"
#include "converter/stored/sidecar.h"
#include "converter/verify.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/archive/shard_store.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/parallel_model.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"
#include "tests/support/trees.h"

namespace ferry::converter {
namespace archive_target_test {

using distckpt::DType;
using support::fails;
using support::same_tree;
using support::TempDir;
using support::test_data;

// A random model: through the archive everything comes out as without it.
class ArchiveOfAnyModel : public testing::TestWithParam<std::uint64_t> {};

TEST_P(ArchiveOfAnyModel, IsNoDetour) {
  std::mt19937_64 random(GetParam());
  const auto model = support::random_tiny_model(random);
  const TempDir dir;
  support::write_tiny_model(model, dir / "hf", GetParam());
  const auto split = GetParam() % 2 == 0 ? std::nullopt : std::optional<std::int64_t>(4000);
  const auto report = convert({.from = dir / "hf",
                               .to = dir / "archive",
                               .format = Format::kArchive,
                               .max_shard_size = split});
  EXPECT_TRUE(report.proved);
  convert({.from = dir / "archive", .to = dir / "back"});
  EXPECT_TRUE(same_tree(dir / "hf", dir / "back"));
  const models::ParallelConfig parallel{.pipeline_model_parallel_size = model.num_layers};
  convert({.from = dir / "hf", .to = dir / "megatron", .parallel = parallel});
  convert({.from = dir / "archive",
           .to = dir / "by_archive",
           .format = Format::kTorchDist,
           .parallel = parallel});
  EXPECT_TRUE(same_tree(dir / "megatron", dir / "by_archive"));
  convert({.from = dir / "megatron", .to = dir / "other", .format = Format::kArchive});
  convert({.from = dir / "other", .to = dir / "from_other"});
  EXPECT_TRUE(same_tree(dir / "hf", dir / "from_other"));
  EXPECT_TRUE(verify({.left = dir / "archive", .right = dir / "megatron"}).identical());
  EXPECT_TRUE(verify({.left = dir / "hf", .right = dir / "archive"}).identical());
  EXPECT_EQ(report.model_digest, digest_checkpoint({.path = dir / "archive"}).model_digest);
}

INSTANTIATE_TEST_SUITE_P(Seeds, ArchiveOfAnyModel, testing::Range<std::uint64_t>(0, 25));

TEST(Archive, LoadsOntoEveryMeshAsItsHuggingFaceFilesDo) {
  for (const char* name : {"hf_llama", "hf_qwen2_tied", "hf_mixtral", "hf_deepseek_v3"}) {
    SCOPED_TRACE(name);
    const auto folder = test_data(name) / "hf";
    const TempDir dir;
    convert({.from = folder, .to = dir / "archive", .format = Format::kArchive});
    const auto checkpoint = open(dir / "archive");
    const support::NaiveWeights weights(folder, checkpoint.map.config);
    for (const auto& mesh : support::meshes_for(checkpoint.map.config))
      ASSERT_NO_FATAL_FAILURE(support::expect_loads(checkpoint, weights, mesh));
  }
}

TEST(Archive, IsOneFileThatCanBeNamedByItself) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  convert({.from = dir / "hf", .to = dir / "archive", .format = Format::kArchive});
  EXPECT_EQ(support::list(dir / "archive"), std::vector<std::string>{"weights.h5"});
  convert({.from = dir / "archive" / "weights.h5", .to = dir / "back"});
  EXPECT_TRUE(same_tree(dir / "hf", dir / "back"));
}

TEST(Archive, OfAnotherDTypeSaysSoInItsConfiguration) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 2);
  convert({.from = dir / "hf",
           .to = dir / "archive",
           .format = Format::kArchive,
           .dtype = DType::kF32});
  convert({.from = dir / "archive", .to = dir / "by_archive"});
  convert({.from = dir / "hf",
           .to = dir / "cast",
           .format = Format::kHuggingFace,
           .dtype = DType::kF32});
  EXPECT_TRUE(same_tree(dir / "cast", dir / "by_archive"));
}

TEST(Archive, IsInspectedFromItsIndex) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 3);
  convert({.from = dir / "hf", .to = dir / "archive", .format = Format::kArchive});
  const auto left = inspect(dir / "hf", {}, {});
  const auto right = inspect(dir / "archive", {}, {});
  EXPECT_EQ(left.num_parameters, right.num_parameters);
  EXPECT_EQ(left.num_bytes, right.num_bytes);
  EXPECT_EQ(left.tensors.size(), right.tensors.size());
  EXPECT_EQ(right.config->family, "llama");
  EXPECT_GT(right.chunks_by_file.at("weights.h5"), 0);
}

TEST(Archive, IsNotReplacedUnlessAsked) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 4);
  support::write_tiny_model({.num_layers = 3}, dir / "other", 5);
  convert({.from = dir / "hf", .to = dir / "archive", .format = Format::kArchive});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"exists already"}, [&] {
    convert({.from = dir / "other", .to = dir / "archive", .format = Format::kArchive});
  }));
  convert({.from = dir / "other",
           .to = dir / "archive",
           .format = Format::kArchive,
           .overwrite = true});
  convert({.from = dir / "archive", .to = dir / "back"});
  EXPECT_TRUE(same_tree(dir / "other", dir / "back"));
}

// A finished run, asked to go on, proves what is there: also against the source as it is now.
TEST(Archive, ThatIsThereIsProvedOnResume) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 6);
  ConvertOptions options{
      .from = dir / "hf", .to = dir / "archive", .format = Format::kArchive, .resume = true};
  convert(options);
  EXPECT_TRUE(convert(options).proved);
  const auto file = dir / "archive" / "weights.h5";
  support::corrupt(file, static_cast<std::int64_t>(std::filesystem::file_size(file)) / 2);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"weights.h5"}, [&] { convert(options); }));
}

TEST(Archive, NeedsAConfiguration) {
  const TempDir dir;
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"config.json", "--hf-config"}, [&] {
    convert({.from = test_data("llama_tp1"), .to = dir / "archive", .format = Format::kArchive});
  }));
  EXPECT_FALSE(std::filesystem::exists(dir / "archive"));
  convert({.from = test_data("llama_tp1"),
           .to = dir / "archive",
           .format = Format::kArchive,
           .hf_config = test_data("hf_llama") / "hf"});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"--hf-config"}, [&] {
    convert(
        {.from = dir / "archive", .to = dir / "out", .hf_config = test_data("hf_llama") / "hf"});
  }));
}

TEST(Archive, HasNoIterations) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 7);
  convert({.from = dir / "hf", .to = dir / "archive", .format = Format::kArchive});
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"no iterations"}, [&] {
    digest_checkpoint({.path = dir / "archive", .iteration = distckpt::parse_iteration("5")});
  }));
}

// Weights among the files that travel would be another model, which transformers loads first.
TEST(Archive, RefusesWeightsThatTheSidecarBrings) {
  const auto form = [](std::map<std::string, std::string> files) {
    files.emplace("hf/config.json", "{}");
    return form_of_sidecar(files, "archive");
  };
  EXPECT_EQ(form({{"hf/tokenizer.json", "x"}}).carried.size(), 2U);
  for (const auto* name : {"hf/model.safetensors", "hf/pytorch_model.bin", "hf/.hidden"})
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {name}, [&] { form({{name, "x"}}); })) << name;

  const auto header = [](const std::string& file, const std::string& tensor) {
    return distckpt::make_safetensors_header(
               file, {{.name = tensor, .dtype = distckpt::DType::kBF16, .shape = {1}}}, {})
        .prefix;
  };
  const std::map<std::string, std::string> two{
      {"headers/model.safetensors", header("model.safetensors", "a")},
      {"headers/b.safetensors", header("b.safetensors", "b")}};
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"index.json", "2 files"}, [&] { form(two); }));
  auto listed = two;
  listed["hf/model.safetensors.index.json"] =
      R"({"weight_map": {"a": "model.safetensors", "b": "b.safetensors"}})";
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"model.safetensors alone"}, [&] { form(listed); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"headers/x.json"}, [&] {
    form({{"headers/x.json", header("x.json", "a")}});
  }));
}

// The names of an archive's small files are no way out of a folder.
TEST(Archive, RefusesPathsThatLeaveTheFolder) {
  for (const auto* name :
       {"hf/../evil", "hf/", "hf/a/b", "hf", "../hf/config.json", "hf/..", "/x", "../x", "tmp/x"}) {
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {}, [&] {
      form_of_sidecar({{"hf/config.json", "{}"}, {name, "x"}}, "archive");
    })) << name;
  }
}

}  // namespace archive_target_test
}  // namespace ferry::converter
