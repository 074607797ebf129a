// Casts, digests, checksums, files, publishing, names and layouts: the small parts that everything
// stands on.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "distckpt/cast.h"
#include "distckpt/checksum_ledger.h"
#include "distckpt/digest.h"
#include "distckpt/file_io.h"
#include "distckpt/filenames.h"
#include "distckpt/parallel_config.h"
#include "distckpt/sharded_tensor.h"
#include "distckpt/work_folder.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace {

using support::fails;
using support::TempDir;

template <typename Into, typename From>
std::optional<Into> cast_one(DType from, From value, DType into, CastRule rule) {
  Into result{};
  const auto refused = cast(from, std::as_bytes(std::span(&value, 1)), into,
                            std::as_writable_bytes(std::span(&result, 1)), rule);
  return refused ? std::nullopt : std::optional(result);
}

TEST(Cast, WidensAndNarrowsEveryHalfPrecisionPattern) {
  for (const auto dtype : {DType::kBF16, DType::kF16}) {
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
      const auto half = static_cast<std::uint16_t>(bits);
      const auto wide = *cast_one<float>(dtype, half, DType::kF32, CastRule::kExact);
      if (!std::isnan(wide)) {
        EXPECT_EQ(static_cast<double>(wide),
                  element_value(dtype, reinterpret_cast<const std::byte*>(&half)));
      }
      EXPECT_EQ(cast_one<std::uint16_t>(DType::kF32, wide, dtype, CastRule::kExact), half);
    }
    if (testing::Test::HasNonfatalFailure()) break;
  }
}

TEST(Cast, RoundsToNearestEvenAndRefusesInfinity) {
  const auto to_bf16 = [](float value) {
    return cast_one<std::uint16_t>(DType::kF32, value, DType::kBF16, CastRule::kRound);
  };
  EXPECT_EQ(to_bf16(1.00390625F), 0x3F80);  // half way, down to even
  EXPECT_EQ(to_bf16(1.01171875F), 0x3F82);  // half way, up to even
  EXPECT_EQ(to_bf16(3.4e38F), std::nullopt);
  EXPECT_EQ(to_bf16(INFINITY), 0x7F80);
  EXPECT_EQ(to_bf16(-NAN), 0xFFC0);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x7F800001U)), 0x7FC0);  // a payload that does not fit
  const auto to_fp16 = [](float value) {
    return cast_one<std::uint16_t>(DType::kF32, value, DType::kF16, CastRule::kRound);
  };
  EXPECT_EQ(to_fp16(65519.0F), 0x7BFF);
  EXPECT_EQ(to_fp16(65520.0F), std::nullopt);
  EXPECT_EQ(to_fp16(0x1p-25F), 0x0000);    // half the smallest subnormal, to even
  EXPECT_EQ(to_fp16(0x1.8p-24F), 0x0002);  // one and a half of them, to even
  EXPECT_EQ(to_fp16(-0.0F), 0x8000);
}

TEST(Cast, CountsUlpsAcrossZero) {
  const auto ulps = [](float a, float b) {
    return ulp_distance(DType::kF32, reinterpret_cast<const std::byte*>(&a),
                        reinterpret_cast<const std::byte*>(&b));
  };
  EXPECT_EQ(ulps(1.0F, std::nextafter(1.0F, 2.0F)), 1U);
  EXPECT_EQ(ulps(0.0F, -0.0F), 0U);
  EXPECT_EQ(ulps(0x1p-149F, -0x1p-149F), 2U);
  EXPECT_EQ(ulps(NAN, 1.0F), std::nullopt);
}

// These values are the format: docs/formats/digest.md.
TEST(Digest, IsPinned) {
  const auto block = digest_block(as_bytes("ferry"));
  const auto text = to_string(block);
  EXPECT_EQ(digest_from_string(text), block);
  EXPECT_EQ(to_string(digest_block({})),
            "99aa06d3014798d86001c324468d497f");  // XXH3-128 of nothing
  const std::array blocks{block};
  EXPECT_NE(digest_tensor(DType::kBF16, {2, 3}, blocks),
            digest_tensor(DType::kBF16, {3, 2}, blocks));
  EXPECT_NE(digest_tensor(DType::kBF16, {6}, blocks), digest_tensor(DType::kF16, {6}, blocks));
  EXPECT_EQ(digest_model({{.name = "b", .digest = block}, {.name = "a", .digest = {}}}),
            digest_model({{.name = "a", .digest = {}}, {.name = "b", .digest = block}}));
  EXPECT_FALSE(digest_from_string("xyz"));
}

TEST(ChecksumLedger, CombinesPartsInAnyOrderAndNoticesGaps) {
  std::mt19937 random(3);
  std::vector<std::byte> bytes(10'000);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
  for (int round = 0; round < 50; ++round) {
    ChecksumLedger ledger;
    ledger.add_range({.storage = 0, .offset = 100, .size = 5000});
    ledger.add_range({.storage = 0, .offset = 6000, .size = 3000});
    ledger.seal();
    std::vector<std::size_t> cuts{0, bytes.size()};
    for (int i = 0; i < 20; ++i) cuts.push_back(random() % bytes.size());
    std::ranges::sort(cuts);
    std::vector<std::vector<ChecksumPart>> all;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      all.emplace_back();
      ledger.checksum(0, static_cast<std::int64_t>(cuts[i]),
                      std::span(bytes).subspan(cuts[i], cuts[i + 1] - cuts[i]), all.back());
    }
    std::ranges::shuffle(all, random);
    for (const auto& parts : all) {
      if (!parts.empty()) {
        EXPECT_FALSE(ledger.combined(0) && ledger.combined(1));
      }
      ledger.commit(parts);
    }
    EXPECT_EQ(ledger.combined(0), crc32(std::span(bytes).subspan(100, 5000)));
    EXPECT_EQ(ledger.combined(1), crc32(std::span(bytes).subspan(6000, 3000)));
    for (const auto& parts : all) {
      if (parts.empty()) continue;
      ledger.commit(parts);  // twice
      EXPECT_FALSE(ledger.combined(0) && ledger.combined(1));
      break;
    }
  }
}

TEST(ReadFile, ReadsTheSameDirectlyAndThroughTheCache) {
  const TempDir dir;
  std::string text(1 << 20, '\0');
  std::mt19937 random(4);
  for (auto& c : text) c = static_cast<char>(random());
  text.resize(text.size() - 77);
  write_text(dir / "file", text);
  const ReadFile cached(dir / "file");
  const ReadFile direct(dir / "file", ReadMode::kDirect);
  for (int i = 0; i < 200; ++i) {
    const auto offset = random() % text.size();
    const auto size = random() % (text.size() - offset);
    std::vector<std::byte> a(size);
    std::vector<std::byte> b(size);
    cached.read_at(static_cast<std::int64_t>(offset), a);
    direct.read_at(static_cast<std::int64_t>(offset), b);
    ASSERT_TRUE(support::same_bytes(a, b));
  }
}

TEST(ReadFile, NamesTheByteAtWhichAFileEnds) {
  const TempDir dir;
  write_text(dir / "file", "0123456789");
  const ReadFile file(dir / "file");
  std::vector<std::byte> into(8);
  EXPECT_TRUE(
      fails(ErrorKind::kCorrupt, {"ends at byte 10", "4 to 12"}, [&] { file.read_at(4, into); }));
  support::cut(dir / "file", 5);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"ends at byte 5", "had 10 bytes"},
                    [&] { file.read_at(0, into); }));
  EXPECT_TRUE(fails(ErrorKind::kIo, {"changed"}, [&] { file.require_unchanged(); }));
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"none"}, [&] { ReadFile(dir / "none"); }));
  EXPECT_TRUE(fails(ErrorKind::kIo, {"not a regular file"}, [&] { ReadFile(dir.path()); }));
}

TEST(WriteFile, ReportsAFileThatMayNotGrow) {
  const TempDir dir;
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
  setrlimit(RLIMIT_FSIZE, &small);
  const auto result =
      fails(ErrorKind::kIo, {"file", "8192 bytes long"}, [&] { WriteFile(dir / "file", 8192); });
  setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_TRUE(result);
}

TEST(WorkFolder, PublishesAtOnceAndLeavesNothingBehind) {
  const TempDir dir;
  const auto target = dir / "deep" / "target";
  {
    WorkFolder work(target, false);
    write_text(work.output() / "file", "new");
    EXPECT_FALSE(std::filesystem::exists(target));
    work.publish(false);
  }
  EXPECT_EQ(read_text(target / "file"), "new");
  EXPECT_EQ(support::list(dir.path()),
            (std::vector<std::string>{"deep", "deep/target", "deep/target/file"}));
}

TEST(WorkFolder, ExchangesAnOldTargetOnlyWhenToldTo) {
  const TempDir dir;
  std::filesystem::create_directories(dir / "target");
  write_text(dir / "target" / "file", "old");
  {
    WorkFolder work(dir / "target", false);
    write_text(work.output() / "file", "new");
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"exists already"}, [&] { work.publish(false); }));
    EXPECT_EQ(read_text(dir / "target" / "file"), "old");
    work.publish(true);
  }
  EXPECT_EQ(read_text(dir / "target" / "file"), "new");
  EXPECT_EQ(support::list(dir.path()), (std::vector<std::string>{"target", "target/file"}));
}

TEST(WorkFolder, RefusesASecondRunAndRemovesWhatAFailedOneMade) {
  const TempDir dir;
  {
    const WorkFolder work(dir / "a" / "target", false);
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"another run"},
                      [&] { WorkFolder(dir / "a" / "target", false); }));
    EXPECT_TRUE(std::filesystem::exists(work.output()));
  }
  EXPECT_FALSE(std::filesystem::exists(dir / "a"));
}

TEST(WorkFolder, KeepsWhatWasDoneForAResume) {
  const TempDir dir;
  {
    WorkFolder work(dir / "target", false);
    write_text(work.output() / "file", "half");
    work.keep();
  }
  {
    WorkFolder work(dir / "target", true);
    EXPECT_EQ(read_text(work.output() / "file"), "half");
    work.keep();
  }
  const WorkFolder work(dir / "target", false);
  EXPECT_FALSE(std::filesystem::exists(work.output() / "file"));
}

TEST(Filenames, ParseWhatTheyBuild) {
  EXPECT_EQ(iteration_folder({.number = 10}), "iter_0000010");
  EXPECT_EQ(parse_iteration_folder("iter_0000010"), Iteration{.number = 10});
  EXPECT_EQ(parse_iteration_folder("release"), Iteration{});
  EXPECT_EQ(parse_iteration_folder("iter_10"), std::nullopt);
  EXPECT_EQ(parse_iteration("-1"), std::nullopt);
  EXPECT_EQ(safetensors_filename(1, 4), "model-00002-of-00004.safetensors");
  for (const auto* name : {"", "..", "a/b", "/a"}) {
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"index"}, [&] {
      require_plain_filename(name, "index");
    })) << name;
  }
}

TEST(ParallelConfig, SharesLayersOutAsMegatronDoes) {
  using Layers = std::vector<int>;
  EXPECT_EQ((ParallelConfig{.pipeline_model_parallel_size = 4}).layers_per_stage(8),
            (Layers{2, 2, 2, 2}));
  EXPECT_EQ(
      (ParallelConfig{.pipeline_model_parallel_size = 3, .num_layers_in_first_pipeline_stage = 1})
          .layers_per_stage(7),
      (Layers{1, 3, 3}));
  EXPECT_EQ((ParallelConfig{.pipeline_model_parallel_size = 3,
                            .num_layers_in_first_pipeline_stage = 1,
                            .num_layers_in_last_pipeline_stage = 2})
                .layers_per_stage(7),
            (Layers{1, 4, 2}));
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"5 of 5 layers", "2 pipeline stages"},
                    [] { ParallelConfig{.pipeline_model_parallel_size = 2}.layers_per_stage(5); }));
  EXPECT_EQ((ParallelConfig{.tensor_model_parallel_size = 2}).padded_vocab_size(250), 256);
  EXPECT_EQ((ParallelConfig{.tensor_model_parallel_size = 2, .make_vocab_size_divisible_by = 4})
                .padded_vocab_size(250),
            256);
}

TEST(ShardedTensor, ValidateNamesTheDimensionThatOverflows) {
  const ShardedTensor tensor{.key = "w",
                             .local_shape = {2, 3},
                             .global_shape = {4, 2, 5},
                             .global_offset = {3, 0, 3},
                             .prepend_axis_num = 1};
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"w", "dimension 2", "3:6", "5"}, [&] { tensor.validate(); }));
}

TEST(ShardedObject, ParsesItsUniqueKey) {
  const ShardedObject object{
      .key = "a._extra_state", .global_shape = {2, 4}, .global_offset = {1, 3}};
  EXPECT_EQ(object.unique_key(), "a._extra_state/shard_1.3_2.4");
  const auto parsed = parse_unique_key(object.unique_key());
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->global_offset, object.global_offset);
  EXPECT_FALSE(parse_unique_key("a/shard_4_4"));
  EXPECT_FALSE(parse_unique_key("a/shard_1.2_4"));
}

}  // namespace
}  // namespace ferry::distckpt
