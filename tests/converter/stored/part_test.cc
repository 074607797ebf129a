#include "converter/stored/part.h"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>

#include "converter/convert.h"
#include "converter/digest_checkpoint.h"
#include "converter/verify.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace part_test {

namespace fs = std::filesystem;
using support::TempDir;

std::set<std::string> names_in(const fs::path& path) {
  std::set<std::string> names;
  for (const auto& tensor : open(path).tensors) names.insert(tensor.name);
  return names;
}

class PartOfAModel : public testing::Test {
 protected:
  void SetUp() override { support::write_tiny_model({}, dir_ / "hf", 1); }

  ConvertReport take(const fs::path& from, const fs::path& to, const Selection& selection) const {
    return convert(
        {.from = from, .to = to, .format = Format::kHuggingFace, .selection = selection});
  }

  const Selection attention_{.include = {"*.layers.1.*", "model.norm.weight"},
                             .exclude = {"*.mlp.*"}};
  TempDir dir_;
};

TEST_F(PartOfAModel, HasTheTensorsThatAreSelectedAndSaysSo) {
  const auto report = take(dir_ / "hf", dir_ / "part", attention_);
  EXPECT_EQ(describe(report.part),
            "--include '*.layers.1.*' --include 'model.norm.weight' --exclude '*.mlp.*'");
  EXPECT_EQ(report.num_tensors, 7);
  const auto part = open(dir_ / "part");
  EXPECT_EQ(part.hf->part, Part{attention_});
  for (const auto& tensor : part.tensors) EXPECT_TRUE(attention_.selects(tensor)) << tensor.name;
  EXPECT_EQ(part.tensors.size(), 7U);
}

TEST_F(PartOfAModel, EqualsThatPartOfTheWholeAndNotTheWhole) {
  take(dir_ / "hf", dir_ / "part", attention_);
  PairOptions pair{.left = dir_ / "hf", .right = dir_ / "part"};
  const auto whole = verify(pair);
  EXPECT_FALSE(whole.identical());
  EXPECT_EQ(whole.unpaired.size(), 14U);
  EXPECT_TRUE(whole.tensors.empty());
  pair.selection = attention_;
  const auto report = verify(pair);
  EXPECT_TRUE(report.identical());
  EXPECT_EQ(report.num_compared, 7);
}

TEST_F(PartOfAModel, IsTheSameFolderFromAnyFormatAndLayout) {
  convert({.from = dir_ / "hf",
           .to = dir_ / "megatron",
           .parallel = {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}});
  take(dir_ / "hf", dir_ / "part", attention_);
  take(dir_ / "megatron", dir_ / "again", attention_);
  EXPECT_EQ(support::read_tree(dir_ / "part"), support::read_tree(dir_ / "again"));
}

TEST_F(PartOfAModel, OfAPartIsOfBoth) {
  take(dir_ / "hf", dir_ / "part", attention_);
  const Selection queries{.include = {"*.q_proj.*"}};
  take(dir_ / "part", dir_ / "smaller", queries);
  EXPECT_EQ(names_in(dir_ / "smaller"),
            std::set<std::string>{"model.layers.1.self_attn.q_proj.weight"});
  EXPECT_EQ(open(dir_ / "smaller").hf->part, (Part{attention_, queries}));
}

TEST_F(PartOfAModel, TravelsThroughMegatronWhereItsTensorsAreWhole) {
  const Selection body{.exclude = {"lm_head.*"}};
  convert({.from = dir_ / "hf",
           .to = dir_ / "megatron",
           .selection = body,
           .parallel = {.tensor_model_parallel_size = 2}});
  EXPECT_EQ(open(dir_ / "megatron").hf->part, Part{body});
  convert({.from = dir_ / "megatron", .to = dir_ / "back"});
  take(dir_ / "hf", dir_ / "part", body);
  EXPECT_EQ(support::read_tree(dir_ / "back"), support::read_tree(dir_ / "part"));
}

TEST_F(PartOfAModel, IsRefusedForMegatronIfATensorWouldHaveHoles) {
  for (const auto* glob : {"*.layers.0.*", "*.q_proj.*", "*.up_proj.*"}) {
    EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"0 times, expected once", "with --to hf"}, [&] {
      convert({.from = dir_ / "hf", .to = dir_ / "megatron", .selection = {.exclude = {glob}}});
    }));
    EXPECT_FALSE(fs::exists(dir_ / "megatron" / "release"));
  }
}

TEST(PartThatPredictsNothing, TravelsThroughMegatron) {
  const TempDir dir;
  const auto whole = support::test_data("hf_glm4_moe") / "hf";
  const Selection body{.exclude = {"model.layers.3.*"}};
  convert({.from = whole, .to = dir / "megatron", .selection = body});
  convert({.from = dir / "megatron", .to = dir / "back"});
  const auto report = verify({.left = dir / "back", .right = whole, .selection = body});
  EXPECT_TRUE(report.identical());
  EXPECT_EQ(report.num_compared, 97);
}

TEST_F(PartOfAModel, RefusesGlobsThatMatchNothing) {
  const auto refused = [&](const Selection& selection, std::string_view why) {
    EXPECT_TRUE(support::fails(ErrorKind::kUsage, {why},
                               [&] { take(dir_ / "hf", dir_ / "part", selection); }));
    EXPECT_FALSE(fs::exists(dir_ / "part"));
  };
  refused({.include = {"*.mlp.*", "layers.*"}}, "--include 'layers.*': matches no tensor");
  refused({.include = {""}}, "--include '': matches no tensor");
  refused({.exclude = {"*.experts.*"}}, "--exclude '*.experts.*': matches no tensor");
  refused({.include = {"lm_head.*"}, .exclude = {"*.weight"}}, "no tensor is left");
}

TEST_F(PartOfAModel, HasExactlyWhatItsRecordSays) {
  take(dir_ / "hf", dir_ / "part", attention_);
  const auto record = dir_ / "part" / distckpt::kPartRecord;
  const auto rewrite = [&](const std::string& text) {
    fs::remove(record);
    distckpt::write_text(record, text);
  };
  rewrite(write_part({{.include = {"*.layers.1.*", "model.norm.weight"}}}));
  EXPECT_TRUE(
      support::fails(ErrorKind::kLayout, {"mlp", "is missing"}, [&] { open(dir_ / "part"); }));
  rewrite(write_part({{.include = {"*.layers.1.*"}, .exclude = {"*.mlp.*"}}}));
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"model.norm.weight", "no rule"},
                             [&] { open(dir_ / "part"); }));
  for (const auto* text :
       {"", "[]", "{}", R"({"format": "ferry-part-1", "selections": []})",
        R"({"format": "ferry-part-1", "selections": [{"include": ["*"]}]})",
        R"({"format": "ferry-part-1", "selections": [{"include": [1], "exclude": []}]})"}) {
    rewrite(text);
    EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"ferry-part.json"}, [&] {
      open(dir_ / "part");
    })) << text;
  }
  rewrite(R"({"format": "ferry-part-2", "selections": []})");
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"ferry-part-2"}, [&] { open(dir_ / "part"); }));
}

TEST_F(PartOfAModel, HasAManifestThatTheWholeCanBeHeldAgainst) {
  take(dir_ / "hf", dir_ / "part", attention_);
  const auto manifest =
      parse_manifest(write_manifest(digest_checkpoint({.path = dir_ / "part"})), "manifest");
  EXPECT_EQ(manifest.part, Part{attention_});
  EXPECT_FALSE(manifest.files.empty());
  const auto whole = digest_checkpoint({.path = dir_ / "hf", .part = manifest.part});
  EXPECT_EQ(whole.model_digest, manifest.model_digest);
  EXPECT_TRUE(whole.files.empty());
  EXPECT_TRUE(compare_manifests(manifest, whole, false).empty());
  const auto again = digest_checkpoint({.path = dir_ / "part", .part = manifest.part});
  EXPECT_TRUE(compare_manifests(manifest, again, true).empty());
}

// Any model, any globs, from either format: the tensors that are selected are there, to the bit.
class PartOfAnyModel : public testing::TestWithParam<std::uint64_t> {};

TEST_P(PartOfAnyModel, EqualsThatPartOfTheWhole) {
  std::mt19937_64 random(GetParam());
  const auto pick = [&](std::size_t count) {
    return std::uniform_int_distribution<std::size_t>(0, count - 1)(random);
  };
  const TempDir dir;
  support::write_tiny_model(support::random_tiny_model(random), dir / "hf", random());
  auto source = dir / "hf";
  if (GetParam() % 2 == 1) {
    source = dir / "megatron";
    convert({.from = dir / "hf", .to = source});
  }
  const auto tensors = open(dir / "hf").tensors;
  // A name with one of its parts replaced by *: one that is there, so that it matches.
  const auto glob = [&] {
    auto name = tensors[pick(tensors.size())].name;
    const auto dot = name.find('.', pick(name.size()));
    return dot == std::string::npos ? "*" + name.substr(name.find('.'))
                                    : name.substr(0, dot) + ".*";
  };
  Selection selection;
  for (auto i = pick(3); i > 0; --i) selection.include.push_back(glob());
  for (auto i = pick(3); i > 0; --i) selection.exclude.push_back(glob());
  SCOPED_TRACE(selection.describe());
  std::set<std::string> expected;
  for (const auto& tensor : tensors) {
    if (tensor.role == distckpt::Role::kWeight && selection.selects(tensor))
      expected.insert(tensor.name);
  }
  if (selection.is_all() || expected.empty()) return;
  convert(
      {.from = source, .to = dir / "part", .format = Format::kHuggingFace, .selection = selection});
  EXPECT_EQ(names_in(dir / "part"), expected);
  const auto report = verify({.left = dir / "hf", .right = dir / "part", .selection = selection},
                             /*weights_only=*/true);
  EXPECT_TRUE(report.identical());
  EXPECT_EQ(report.num_compared, static_cast<std::int64_t>(expected.size()));
}

INSTANTIATE_TEST_SUITE_P(Seeds, PartOfAnyModel, testing::Range<std::uint64_t>(0, 25));

}  // namespace part_test
}  // namespace ferry::converter
