// Deltas of random models between random formats and layouts, and what is refused.
#include "converter/delta/delta.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "converter/delta/apply_delta.h"
#include "converter/delta/delta_manifest.h"
#include "converter/delta/make_delta.h"
#include "converter/verify.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"
#include "tests/support/trees.h"

namespace ferry::converter {
namespace delta_test {

namespace fs = std::filesystem;
using support::random_layout;
using support::TempDir;
using support::TinyModel;

// A copy of a Hugging Face folder in which about one in `one_in` bytes of the weights is another.
// Two copies of a tensor stay the same: the place in the tensor alone decides.
void train(const fs::path& from, const fs::path& to, std::uint64_t one_in, std::uint64_t seed) {
  fs::copy(from, to);
  for (const auto& entry : fs::directory_iterator(to)) {
    if (entry.path().extension() != ".safetensors") continue;
    const auto header = distckpt::read_safetensors_header(entry.path());
    auto bytes = support::read_bytes(entry.path());
    for (const auto& tensor : header.entries) {
      if (tensor.name.ends_with("inv_freq")) continue;
      std::mt19937_64 random(seed);
      for (auto at = tensor.begin; at < tensor.end; ++at) {
        if (random() % one_in == 0) bytes[static_cast<std::size_t>(at)] ^= std::byte{1};
      }
    }
    support::write_bytes(entry.path(), bytes);
  }
}

DeltaChain chain_of(const std::vector<fs::path>& paths) {
  std::vector<std::unique_ptr<Delta>> deltas;
  for (const auto& path : paths) {
    for (auto& delta : open_deltas(path)) deltas.push_back(std::move(delta));
  }
  return DeltaChain(std::move(deltas));
}

ConvertReport apply(const fs::path& base,
                    const std::vector<fs::path>& deltas,
                    const fs::path& to,
                    Format format = Format::kHuggingFace,
                    const models::ParallelConfig& layout = {}) {
  auto chain = chain_of(deltas);
  return apply_delta({.from = base, .to = to, .format = format, .parallel = layout}, chain);
}

MakeDeltaReport make(const fs::path& base,
                     const fs::path& result,
                     const fs::path& to,
                     DeltaTarget form = DeltaTarget::kFerry) {
  return make_delta({.ends = {.left = base, .right = result}, .to = to, .form = form});
}

class RandomDelta : public testing::TestWithParam<std::uint64_t> {};

TEST_P(RandomDelta, OfAnyFormatsAndLayoutsMakesTheResultBitForBit) {
  std::mt19937_64 random(GetParam());
  const auto model = support::random_tiny_model(random);
  const TempDir dir;
  support::write_tiny_model(model, dir / "base", GetParam());
  train(dir / "base", dir / "result", std::array{1U, 3U, 40U}[random() % 3], GetParam());
  const auto moved = [&](const std::string& name) {
    const auto choice = random() % 3;
    if (choice == 0) return dir / name;
    auto to = dir / (name + "_moved");
    convert({.from = dir / name,
             .to = to,
             .format = choice == 1 ? Format::kTorchDist : Format::kArchive,
             .parallel = choice == 1 ? random_layout(model, random) : models::ParallelConfig{}});
    return to;
  };
  const auto form = random() % 2 == 0 ? DeltaTarget::kFerry : DeltaTarget::kSlime;
  const auto base = moved("base");  // in this order, whatever a compiler does with arguments
  const auto made = make(base, moved("result"), dir / "delta", form);
  const auto report = apply(dir / "base", {made.target}, dir / "applied");
  EXPECT_TRUE(report.proved);
  EXPECT_EQ(report.model_digest, made.result_digest);
  EXPECT_TRUE(support::same_tree(dir / "result", dir / "applied"));
  apply(dir / "base", {made.target}, dir / "sharded", Format::kTorchDist,
        random_layout(model, random));
  EXPECT_TRUE(verify({.left = dir / "result", .right = dir / "sharded"}).identical());
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomDelta, testing::Range<std::uint64_t>(0, 48));

TEST(SlimeDelta, ATiedHeadThatIsStoredTwiceChangesWithTheEmbedding) {
  const TempDir dir;
  support::write_tiny_model({.tied = true, .repeat_tied_head = true}, dir / "base", 1);
  train(dir / "base", dir / "result", 3, 1);
  const auto delta = make(dir / "base", dir / "result", dir / "delta", DeltaTarget::kSlime).target;
  apply(dir / "base", {delta}, dir / "applied");
  EXPECT_TRUE(support::same_tree(dir / "result", dir / "applied"));
  apply(dir / "base", {delta}, dir / "sharded", Format::kTorchDist);
  apply(dir / "sharded",
        {make(dir / "result", dir / "base", dir / "back", DeltaTarget::kSlime).target},
        dir / "again");
  EXPECT_TRUE(support::same_tree(dir / "base", dir / "again"));
}

TEST(FerryDelta, AWrongNumberOfChangesIsRefused) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "v0", 1);
  train(dir / "v0", dir / "v1", 50, 1);
  const auto delta = make(dir / "v0", dir / "v1", dir / "delta").target;
  const auto manifest = delta / "ferry-delta.json";
  const auto text = distckpt::read_text(manifest);
  const auto at = text.find("\"changed\": ") + 11;
  const auto with = [&](std::string_view number) {
    auto changed = text;
    changed.replace(at, text.find_first_of(",\n", at) - at, number);
    distckpt::write_text(manifest, changed);
  };
  with("1");
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"changed, ferry-delta.json says 1"},
                             [&] { apply(dir / "v0", {delta}, dir / "applied"); }));
  EXPECT_FALSE(fs::exists(dir / "applied"));
  train(dir / "v1", dir / "v2", 50, 2);
  const auto next = make(dir / "v1", dir / "v2", dir / "next").target;
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"changed, ferry-delta.json says 1"}, [&] {
    apply(dir / "v0", {delta, next}, dir / "applied");
  }));
  EXPECT_FALSE(fs::exists(dir / "applied"));
  for (const auto* number : {"-1", "0", "999999999"}) {
    with(number);
    EXPECT_TRUE(
        support::fails(ErrorKind::kCorrupt, {"changed", number}, [&] { chain_of({delta}); }));
  }
}

class OfOneModel : public testing::TestWithParam<DeltaTarget> {
 protected:
  void SetUp() override {
    support::write_tiny_model({.ffn = 70'000, .num_files = 2}, dir_ / "v0", 1);
    for (const int version : {1, 2, 3}) {
      train(version_folder(version - 1), version_folder(version), 50,
            static_cast<std::uint64_t>(version));
    }
  }
  fs::path version_folder(int version) const { return dir_ / fmt::format("v{}", version); }
  fs::path make_step(int from, int to) {
    const auto folder = GetParam() == DeltaTarget::kSlime ? std::string("versions")
                                                          : fmt::format("delta{}{}", from, to);
    return make(version_folder(from), version_folder(to), dir_ / folder, GetParam()).target;
  }

  TempDir dir_;
};

TEST_P(OfOneModel, AChainIsAppliedInOnePass) {
  const std::vector<fs::path> deltas{make_step(0, 1), make_step(1, 2), make_step(2, 3)};
  apply(dir_ / "v0", deltas, dir_ / "applied");
  EXPECT_TRUE(support::same_tree(dir_ / "v3", dir_ / "applied"));
}

TEST_P(OfOneModel, AChainWithAGapIsRefused) {
  const std::vector<fs::path> deltas{make_step(0, 1), make_step(1, 2), make_step(2, 3)};
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"the delta before it makes"}, [&] {
    chain_of({deltas[0], deltas[2]});
  }));
}

TEST_P(OfOneModel, AnotherBaseIsRefusedAndNothingIsPublished) {
  const auto delta = make_step(0, 1);
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"another base"},
                             [&] { apply(dir_ / "v2", {delta}, dir_ / "applied"); }));
  EXPECT_FALSE(fs::exists(dir_ / "applied"));
}

TEST_P(OfOneModel, AppliedByOneThreadGivesTheSameFolder) {
  const auto delta = make_step(0, 1);
  auto chain = chain_of({delta});
  apply_delta(
      {.from = dir_ / "v0", .to = dir_ / "applied", .format = Format::kHuggingFace, .threads = 1},
      chain);
  EXPECT_TRUE(support::same_tree(dir_ / "v1", dir_ / "applied"));
}

TEST_P(OfOneModel, MadeByAnyNumberOfThreadsIsTheSameFolder) {
  for (const int threads : {1, 7}) {
    make_delta({.ends = {.left = dir_ / "v0", .right = dir_ / "v1", .threads = threads},
                .to = dir_ / fmt::format("by{}", threads),
                .form = GetParam()});
  }
  EXPECT_TRUE(support::same_tree(dir_ / "by1", dir_ / "by7"));
}

// Whatever byte is damaged: the result is not published as if it were the new checkpoint.
TEST_P(OfOneModel, ADamagedFileIsNoticed) {
  const auto delta = make_step(0, 1);
  auto intact = chain_of({delta});
  const auto result = verify_delta({.base = dir_ / "v0"}, intact).result_digest;
  std::mt19937_64 random(5);
  for (int i = 0; i < 12; ++i) {
    for (const auto& file : fs::directory_iterator(delta)) {
      const auto& path = file.path();
      const auto size = static_cast<std::int64_t>(fs::file_size(path));
      const auto at = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(size));
      support::corrupt(path, at);
      try {
        auto chain = chain_of({delta});
        const auto report = verify_delta({.base = dir_ / "v0"}, chain);
        // A byte of the names in an index, or of what nobody reads.
        EXPECT_EQ(report.result_digest, result) << path << " byte " << at;
      } catch (const Error& error) {
        EXPECT_NE(error.kind(), ErrorKind::kBug) << error.report();
      }
      support::corrupt(path, at);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Forms,
                         OfOneModel,
                         testing::Values(DeltaTarget::kFerry, DeltaTarget::kSlime),
                         [](const auto& form) {
                           return form.param == DeltaTarget::kFerry ? "Ferry" : "Slime";
                         });

class MakeDelta : public testing::Test {
 protected:
  void SetUp() override {
    support::write_tiny_model({}, dir_ / "base", 1);
    train(dir_ / "base", dir_ / "result", 9, 2);
  }
  TempDir dir_;
};

TEST_F(MakeDelta, CountsWhatChanged) {
  const auto same = make(dir_ / "base", dir_ / "base", dir_ / "none");
  EXPECT_EQ(same.num_changed, 0);
  EXPECT_EQ(same.base_digest, same.result_digest);
  const auto report = make(dir_ / "base", dir_ / "result", dir_ / "delta");
  EXPECT_GT(report.num_changed, report.num_elements / 10);
  EXPECT_LT(report.num_changed, report.num_elements / 3);
}

TEST_F(MakeDelta, CarriesFilesThatChanged) {
  distckpt::write_text(dir_ / "result" / "tokenizer.json", "{\"other\": 1}");
  distckpt::write_text(dir_ / "result" / "letter.txt", "dear");
  const auto report = make(dir_ / "base", dir_ / "result", dir_ / "delta");
  EXPECT_EQ(report.files, (std::vector<std::string>{"letter.txt", "tokenizer.json"}));
  apply(dir_ / "base", {dir_ / "delta"}, dir_ / "applied");
  EXPECT_TRUE(support::same_tree(dir_ / "result", dir_ / "applied"));
}

TEST_F(MakeDelta, RefusesAFileOfTheDeltaThatWasReplaced) {
  distckpt::write_text(dir_ / "result" / "letter.txt", "dear");
  make(dir_ / "base", dir_ / "result", dir_ / "delta");
  distckpt::write_text(dir_ / "delta" / "files" / "letter.txt", "bear");
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"letter.txt"},
                             [&] { apply(dir_ / "base", {dir_ / "delta"}, dir_ / "applied"); }));
}

TEST_F(MakeDelta, RefusesModelsOfOtherTensors) {
  support::write_tiny_model({.num_layers = 3}, dir_ / "deeper", 1);
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"model.layers.2.", "result only"},
                             [&] { make(dir_ / "base", dir_ / "deeper", dir_ / "delta"); }));
  EXPECT_FALSE(fs::exists(dir_ / "delta"));
}

TEST_F(MakeDelta, RefusesAnotherDtype) {
  support::write_tiny_model({.dtype = distckpt::DType::kF32, .norm_dtype = distckpt::DType::kF32},
                            dir_ / "wide", 1);
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"two dtypes"},
                             [&] { make(dir_ / "base", dir_ / "wide", dir_ / "delta"); }));
}

TEST_F(MakeDelta, DoesNotReplaceWhatIsThere) {
  make(dir_ / "base", dir_ / "result", dir_ / "delta");
  const auto before = support::read_tree(dir_ / "delta");
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"delta"},
                             [&] { make(dir_ / "result", dir_ / "base", dir_ / "delta"); }));
  EXPECT_EQ(support::read_tree(dir_ / "delta"), before);
}

TEST_F(MakeDelta, NumbersTheVersionsOfAFolder) {
  EXPECT_EQ(make(dir_ / "base", dir_ / "result", dir_ / "v", DeltaTarget::kSlime).target.filename(),
            "weight_v000001");
  EXPECT_EQ(make(dir_ / "result", dir_ / "base", dir_ / "v", DeltaTarget::kSlime).target.filename(),
            "weight_v000002");
  const auto chain = chain_of({dir_ / "v"});
  EXPECT_EQ(chain.deltas().size(), 2U);
}

TEST_F(MakeDelta, GivesVllmIndicesAndValuesThatMakeTheResult) {
  make(dir_ / "base", dir_ / "result", dir_ / "delta", DeltaTarget::kVllm);
  const auto patch = support::read_bytes(dir_ / "delta" / "patch.safetensors");
  std::map<std::string, distckpt::SafetensorsEntry> parts;
  for (const auto& entry :
       distckpt::read_safetensors_header(dir_ / "delta" / "patch.safetensors").entries)
    parts.emplace(entry.name, entry);
  const auto file = dir_ / "base" / "model.safetensors";
  auto bytes = support::read_bytes(file);
  for (const auto& tensor : distckpt::read_safetensors_header(file).entries) {
    const auto& indices = parts.at(tensor.name + ".indices");
    const auto& values = parts.at(tensor.name + ".values");
    EXPECT_EQ(indices.dtype, distckpt::DType::kI32);
    EXPECT_EQ(values.dtype, tensor.dtype);
    for (std::int64_t i = 0; i < indices.shape[0]; ++i) {
      std::int32_t at = 0;
      std::memcpy(&at, patch.data() + indices.begin + 4 * i, 4);
      std::memcpy(bytes.data() + tensor.begin + 2 * at, patch.data() + values.begin + 2 * i, 2);
    }
  }
  EXPECT_TRUE(
      support::same_bytes(support::read_bytes(dir_ / "result" / "model.safetensors"), bytes));
}

TEST_F(MakeDelta, GivesVllmNoNan) {
  auto bytes = support::read_bytes(dir_ / "result" / "model.safetensors");
  bytes[bytes.size() - 1] = std::byte{0x7F};  // a bf16 NaN
  bytes[bytes.size() - 2] = std::byte{0xFF};
  support::write_bytes(dir_ / "result" / "model.safetensors", bytes);
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"NaN"}, [&] {
    make(dir_ / "base", dir_ / "result", dir_ / "delta", DeltaTarget::kVllm);
  }));
  EXPECT_FALSE(fs::exists(dir_ / "delta"));
}

TEST_F(MakeDelta, WritesPatchesForVllmAlone) {
  make(dir_ / "base", dir_ / "result", dir_ / "delta", DeltaTarget::kVllm);
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"a patch for vLLM"},
                             [&] { open_deltas(dir_ / "delta"); }));
}

TEST(Deltas, RefuseAFolderThatIsNone) {
  const TempDir dir;
  fs::create_directory(dir / "empty");
  EXPECT_TRUE(support::fails(ErrorKind::kNotFound, {"no delta lies there"},
                             [&] { open_deltas(dir / "empty"); }));
}

TEST(Deltas, RefuseAWholeCheckpointAmongVersions) {
  const TempDir dir;
  support::write_tiny_model({}, dir / "weight_v000003", 1);
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"weight_v000003", "whole checkpoint"},
                             [&] { open_deltas(dir.path()); }));
}

}  // namespace delta_test
}  // namespace ferry::converter
