#include "converter/convert.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <random>
#include <string>
#include <string_view>
#include <utility>

#include "converter/verify.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"
#include "tests/support/trees.h"

namespace ferry::converter {
namespace convert_test {

using distckpt::DType;
using support::random_layout;
using support::same_tree;
using support::TempDir;
using support::TinyModel;

// HF -> Megatron -> Megatron at another layout -> HF: the same folder, byte for byte.
TEST(Convert, ThereAndBackOverTwoRandomLayoutsIsTheSameFolder) {
  constexpr int kCases = 400;
  for (int seed = 0; seed < kCases; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(static_cast<std::uint64_t>(seed));
    const auto model = support::random_tiny_model(random);
    const TempDir dir;
    support::write_tiny_model(model, dir / "hf", static_cast<std::uint64_t>(seed));
    convert({.from = dir / "hf", .to = dir / "first", .parallel = random_layout(model, random)});
    convert({.from = dir / "first",
             .to = dir / "second",
             .format = Format::kTorchDist,
             .parallel = random_layout(model, random)});
    const auto report = convert({.from = dir / "second", .to = dir / "back"});
    EXPECT_TRUE(report.proved);
    ASSERT_TRUE(same_tree(dir / "hf", dir / "back"));
    ASSERT_TRUE(verify({.left = dir / "hf", .right = dir / "second"}).identical());
  }
}

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

TEST(Convert, RefusesATiedHeadThatDiffersFromItsEmbedding) {
  const TempDir dir;
  TinyModel model{.tied = false};
  support::write_tiny_model(model, dir / "hf", 4);
  auto config = distckpt::read_text(dir / "hf" / "config.json");
  const std::string_view untied = "\"tie_word_embeddings\": false";
  config.replace(config.find(untied), untied.size(), "\"tie_word_embeddings\": true");
  distckpt::write_text(dir / "hf" / "config.json", config);
  EXPECT_TRUE(support::fails(ErrorKind::kLayout,
                             {"model.embed_tokens.weight", "second copy differs"},
                             [&] { convert({.from = dir / "hf", .to = dir / "megatron"}); }));
  EXPECT_FALSE(std::filesystem::exists(dir / "megatron"));
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

// Whenever the source is replaced: nothing of the two is published.
TEST(Convert, PublishesNothingOfASourceThatIsReplacedMeanwhile) {
  for (const std::string_view form : {"hf", "megatron"}) {
    for (const std::string_view stage : {"copying", "proving"}) {
      SCOPED_TRACE(fmt::format("{} {}", form, stage));
      const TempDir dir;
      for (const std::uint64_t seed : {1, 2}) {
        support::write_tiny_model({}, dir / fmt::format("hf{}", seed), seed);
        convert(
            {.from = dir / fmt::format("hf{}", seed), .to = dir / fmt::format("megatron{}", seed)});
      }
      const auto source = dir / fmt::format("{}1", form);
      bool replaced = false;
      const auto progress = [&](const Progress& now) {
        if (now.stage != stage || std::exchange(replaced, true)) return true;
        std::filesystem::rename(source, dir / "away");
        std::filesystem::rename(dir / fmt::format("{}2", form), source);
        return true;
      };
      EXPECT_TRUE(
          support::fails(ErrorKind::kIo, {"was replaced by another file", "nobody write"}, [&] {
            convert({.from = source, .to = dir / "out", .format = Format::kHuggingFace}, progress);
          }));
      EXPECT_TRUE(replaced);
      EXPECT_FALSE(std::filesystem::exists(dir / "out"));
      EXPECT_FALSE(std::filesystem::exists(dir / ".out.ferry"));
    }
  }
}

TEST(Convert, RefusesTensorParallelismThatFitsNoQueryGroups) {
  const TempDir dir;
  support::write_tiny_model({.num_query_groups = 3}, dir / "hf", 6);
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"--tp 2", "3 query groups"}, [&] {
    convert({.from = dir / "hf", .to = dir / "out", .parallel = {.tensor_model_parallel_size = 2}});
  }));
}

TEST(Verify, NamesTheTensorAndTheFirstElementThatDiffers) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 7);
  convert({.from = dir / "hf", .to = dir / "same", .format = Format::kHuggingFace});
  auto bytes = distckpt::read_text(dir / "same" / "model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  distckpt::write_text(dir / "same" / "model.safetensors", bytes);
  const auto report = verify({.left = dir / "hf", .right = dir / "same"});
  ASSERT_EQ(report.tensors.size(), 1U);
  EXPECT_EQ(report.tensors[0].num_different, 1);
  EXPECT_EQ(report.tensors[0].max_ulps, 256U);  // the lowest bit of the high byte
  EXPECT_FALSE(report.identical());
}

TEST(Verify, ReportsASettingThatDiffers) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "hf", 8);
  convert({.from = dir / "hf", .to = dir / "same", .format = Format::kHuggingFace});
  auto config = distckpt::read_text(dir / "same" / "config.json");
  config.replace(config.find("10000.0"), 7, "20000.0");
  distckpt::write_text(dir / "same" / "config.json", config);
  const auto report = verify({.left = dir / "hf", .right = dir / "same"});
  ASSERT_EQ(report.configuration.size(), 1U);
  EXPECT_EQ(report.configuration[0], "config.json: rope_theta: 10000.0, 20000.0");
}

}  // namespace convert_test
}  // namespace ferry::converter
