#include "converter/delta/delta_manifest.h"

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"

namespace ferry::converter {
namespace delta_manifest_test {

using support::fails;

distckpt::Digest digest(std::string_view text) {
  return distckpt::digest_block(distckpt::as_bytes(text));
}

DeltaManifest example() {
  return {.keep_quantized = true,
          .tensors = {{.name = "a",
                       .dtype = distckpt::DType::kBF16,
                       .shape = {2, 3},
                       .base = digest("a"),
                       .result = digest("a"),
                       .num_changed = 0},
                      {.name = "b",
                       .dtype = distckpt::DType::kF32,
                       .shape = {4},
                       .base = digest("b"),
                       .result = digest("new b"),
                       .num_changed = 3}},
          .files = {{.name = "config.json", .size = 7, .digest = digest("config")}}};
}

// The text of the example with one part replaced.
std::string text_with(std::string_view part, std::string_view other) {
  auto text = write_delta_manifest(example());
  const auto at = text.find(part);
  EXPECT_NE(at, text.npos) << part;
  return text.replace(at, part.size(), other);
}

::testing::AssertionResult is_corrupt(std::string_view part,
                                      std::string_view other,
                                      std::string_view why) {
  return fails(ErrorKind::kCorrupt, {"m: ", why},
               [&] { parse_delta_manifest(text_with(part, other), "m"); });
}

TEST(DeltaManifest, IsReadAsItWasWritten) {
  const auto read = parse_delta_manifest(write_delta_manifest(example()), "m");
  EXPECT_EQ(write_delta_manifest(read), write_delta_manifest(example()));
  EXPECT_TRUE(read.keep_quantized);
  ASSERT_EQ(read.tensors.size(), 2U);
  EXPECT_EQ(read.tensors[0].shape, (distckpt::Shape{2, 3}));
  EXPECT_EQ(read.tensors[0].result, digest("a"));
  EXPECT_EQ(read.tensors[1].num_changed, 3);
  EXPECT_EQ(read.tensors[1].result, digest("new b"));
  ASSERT_EQ(read.files.size(), 1U);
  EXPECT_EQ(read.files[0].size, 7);
}

TEST(DeltaManifest, BothEndsHaveDigestsOfTheirOwn) {
  auto manifest = example();
  EXPECT_NE(manifest.base_digest(), manifest.result_digest());
  manifest.tensors[1].result = manifest.tensors[1].base;
  EXPECT_EQ(manifest.base_digest(), manifest.result_digest());
}

TEST(DeltaManifest, RefusesAnotherFormat) {
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"ferry-delta-9", "expected \"ferry-delta-1\""}, [] {
    parse_delta_manifest(text_with("ferry-delta-1", "ferry-delta-9"), "m");
  }));
}

TEST(DeltaManifest, RefusesADTypeThatIsUnknown) {
  EXPECT_TRUE(is_corrupt("\"BF16\"", "\"BF17\"", "a: the dtype BF17 is unknown"));
}

TEST(DeltaManifest, RefusesMoreChangesThanElements) {
  EXPECT_TRUE(is_corrupt("\"changed\": 3", "\"changed\": 5", "b: changed: 5 of 4 elements"));
}

TEST(DeltaManifest, RefusesAChangeOfNothing) {
  EXPECT_TRUE(is_corrupt("\"changed\": 3", "\"changed\": 0", "b: changed: 0 of 4 elements"));
}

TEST(DeltaManifest, RefusesWhatIsNoDigest) {
  EXPECT_TRUE(is_corrupt(to_string(digest("a")), "0123", "\"0123\" is not a digest"));
}

TEST(DeltaManifest, RefusesADigestThatIsNotThatOfTheTensors) {
  EXPECT_TRUE(is_corrupt(to_string(digest("a")), to_string(digest("other a")), "base: says "));
}

TEST(DeltaManifest, RefusesATextThatIsCutOff) {
  const auto text = write_delta_manifest(example());
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"m: "}, [&] {
    parse_delta_manifest(std::string_view(text).substr(0, text.size() / 2), "m");
  }));
}

}  // namespace delta_manifest_test
}  // namespace ferry::converter
