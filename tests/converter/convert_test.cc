#include "converter/convert.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <random>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "converter/verify.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"
#include "tests/support/trees.h"

namespace ferry::converter {
namespace convert_test {

namespace fs = std::filesystem;
using distckpt::DType;
using support::random_layout;
using support::same_tree;
using support::TempDir;
using support::TinyModel;

// HF -> Megatron -> Megatron at another layout -> HF, of a random model and layouts.
class ThereAndBack : public testing::TestWithParam<std::uint64_t> {};

TEST_P(ThereAndBack, OverTwoRandomLayoutsIsTheSameFolder) {
  std::mt19937_64 random(GetParam());
  const auto model = support::random_tiny_model(random);
  const TempDir dir;
  support::write_tiny_model(model, dir / "hf", GetParam());
  convert({.from = dir / "hf", .to = dir / "first", .parallel = random_layout(model, random)});
  convert({.from = dir / "first",
           .to = dir / "second",
           .format = Format::kTorchDist,
           .parallel = random_layout(model, random)});
  const auto report = convert({.from = dir / "second", .to = dir / "back"});
  EXPECT_TRUE(report.proved);
  EXPECT_TRUE(same_tree(dir / "hf", dir / "back"));
  EXPECT_TRUE(verify({.left = dir / "hf", .right = dir / "second"}).identical());
}

INSTANTIATE_TEST_SUITE_P(Seeds, ThereAndBack, testing::Range<std::uint64_t>(0, 400));

TEST(Convert, GivesTheSameDigestInEveryFormatAndLayout) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 1);
  const auto there = convert(
      {.from = dir / "hf", .to = dir / "megatron", .parallel = {.tensor_model_parallel_size = 2}});
  const auto back = convert({.from = dir / "megatron", .to = dir / "back"});
  EXPECT_EQ(there.model_digest, back.model_digest);
}

TEST(Convert, KeepsADtypeThatHadToBeWidened) {
  // Layers of different dtypes share one stacked tensor: the narrower is stored wide, and comes
  // back narrow.
  const TempDir dir;
  support::write_tiny_model({.dtype = DType::kBF16, .norm_dtype = DType::kF32}, dir / "hf", 2);
  convert({.from = dir / "hf", .to = dir / "megatron"});
  convert({.from = dir / "megatron", .to = dir / "back"});
  EXPECT_TRUE(same_tree(dir / "hf", dir / "back"));
}

TEST(Convert, CarriesDerivedTensorsThroughTheSidecar) {
  const TempDir dir;
  support::write_tiny_model({.inv_freq = true}, dir / "hf", 3);
  convert({.from = dir / "hf", .to = dir / "megatron"});
  convert({.from = dir / "megatron", .to = dir / "back"});
  EXPECT_TRUE(same_tree(dir / "hf", dir / "back"));
}

TEST(Convert, FilesThatAreMadeAnewHoldNoDerivedTensors) {
  const TempDir dir;
  support::write_tiny_model({.inv_freq = true}, dir / "hf", 3);
  convert({.from = dir / "hf",
           .to = dir / "split",
           .format = Format::kHuggingFace,
           .max_shard_size = 4'000});
  EXPECT_TRUE(fs::exists(dir / "split" / "model.safetensors.index.json"));
  const auto index = distckpt::read_text(dir / "split" / "model.safetensors.index.json");
  EXPECT_EQ(index.find("inv_freq"), std::string::npos);
  EXPECT_TRUE(verify({.left = dir / "hf", .right = dir / "split"}).identical());
}

// A model whose config.json ties its ends, in vain.
TEST(Convert, UntiesAHeadThatDiffersFromItsEmbedding) {
  const TempDir dir;
  TinyModel model{.tied = false};
  support::write_tiny_model(model, dir / "hf", 4);
  auto config = distckpt::read_text(dir / "hf" / "config.json");
  const std::string_view untied = "\"tie_word_embeddings\": false";
  config.replace(config.find(untied), untied.size(), "\"tie_word_embeddings\": true");
  distckpt::write_text(dir / "hf" / "config.json", config);
  const auto there = convert({.from = dir / "hf", .to = dir / "megatron"});
  ASSERT_EQ(there.training_notes.size(), 1U);
  EXPECT_NE(there.training_notes.front().find("lm_head.weight"), std::string::npos);
  convert({.from = dir / "megatron", .to = dir / "back"});
  EXPECT_NE(distckpt::read_text(dir / "back" / "config.json").find(untied), std::string::npos);
  EXPECT_TRUE(fs::exists(dir / "back" / "model.safetensors"));
}

TEST(Convert, RefusesToOverwriteWhatIsNoCheckpoint) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 5);
  std::filesystem::create_directory(dir / "home");
  distckpt::write_text(dir / "home" / "letter.txt", "dear");
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"holds letter.txt", "not overwritten"}, [&] {
    convert({.from = dir / "hf",
             .to = dir / "home",
             .format = Format::kHuggingFace,
             .overwrite = true});
  }));
  EXPECT_EQ(distckpt::read_text(dir / "home" / "letter.txt"), "dear");
}

// A source of either form, replaced while it is copied or while the target is proved.
class ReplacedSource
    : public testing::TestWithParam<std::tuple<std::string_view, std::string_view>> {};

TEST_P(ReplacedSource, IsNotPublished) {
  const auto [form, stage] = GetParam();
  const TempDir dir;
  for (const std::uint64_t seed : {1, 2}) {
    const auto hf = dir / fmt::format("hf{}", seed);
    support::write_tiny_model({}, hf, seed);
    if (form == "megatron") convert({.from = hf, .to = dir / fmt::format("megatron{}", seed)});
  }
  const auto source = dir / fmt::format("{}1", form);
  bool replaced = false;
  const auto progress = [&](const Progress& now) {
    if (now.stage != stage || std::exchange(replaced, true)) return true;
    std::filesystem::rename(source, dir / "away");
    std::filesystem::rename(dir / fmt::format("{}2", form), source);
    return true;
  };
  EXPECT_TRUE(support::fails(ErrorKind::kIo, {"was replaced by another file", "nobody write"}, [&] {
    convert({.from = source, .to = dir / "out", .format = Format::kHuggingFace}, progress);
  }));
  EXPECT_TRUE(replaced);
  EXPECT_FALSE(std::filesystem::exists(dir / "out"));
  EXPECT_FALSE(std::filesystem::exists(dir / ".out.ferry"));
}

INSTANTIATE_TEST_SUITE_P(Stages,
                         ReplacedSource,
                         testing::Combine(testing::Values("hf", "megatron"),
                                          testing::Values("copying", "proving")));

TEST(Convert, RefusesTensorParallelismThatFitsNoQueryGroups) {
  const TempDir dir;
  support::write_tiny_model({.num_query_groups = 3}, dir / "hf", 6);
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"--tp 2", "3 query groups"}, [&] {
    convert({.from = dir / "hf", .to = dir / "out", .parallel = {.tensor_model_parallel_size = 2}});
  }));
}

// A run with --resume that proves what an earlier one published is stopped at a stage of the proof.
class InterruptedProof : public testing::TestWithParam<std::string_view> {};

TEST_P(InterruptedProof, IsResumed) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 7);
  ConvertOptions options{.from = dir / "hf", .to = dir / "out"};
  convert(options);
  options.resume = true;
  const auto stop = [&](const Progress& now) -> bool {
    if (now.stage == GetParam()) fail(ErrorKind::kCancelled, "interrupted");
    return true;
  };
  for (int times = 0; times < 2; ++times) {
    EXPECT_TRUE(support::fails(ErrorKind::kCancelled, {"interrupted", "--resume goes on"},
                               [&] { convert(options, stop); }));
    EXPECT_TRUE(std::filesystem::exists(dir / "out/.release.ferry/reread"));
  }
  const auto report = convert(options);
  EXPECT_TRUE(report.proved);
  EXPECT_EQ(report.resumed_bytes, report.bytes);  // the source's digests are known by now
  EXPECT_FALSE(std::filesystem::exists(dir / "out/.release.ferry"));
}

INSTANTIATE_TEST_SUITE_P(Stages, InterruptedProof, testing::Values("reading", "proving"));

}  // namespace convert_test
}  // namespace ferry::converter
