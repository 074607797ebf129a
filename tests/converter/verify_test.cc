#include "converter/verify.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "converter/diff.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace verify_test {

using Lines = std::vector<std::string>;

class Verify : public testing::Test {
 protected:
  void write(const support::TinyModel& model) {
    support::write_tiny_model(model, dir_ / "hf", 1);
    std::filesystem::copy(dir_ / "hf", dir_ / "same");
  }
  VerifyReport verify_both(bool weights_only = false) const {
    return verify({.left = dir_ / "hf", .right = dir_ / "same"}, weights_only);
  }

  support::TempDir dir_;
};

TEST_F(Verify, ACopyIsIdentical) {
  write({});
  const auto report = verify_both();
  EXPECT_TRUE(report.identical());
  EXPECT_EQ(report.num_compared, 21);
}

TEST_F(Verify, NamesTheTensorAndTheFirstElementThatDiffers) {
  write({});
  auto bytes = distckpt::read_text(dir_ / "same" / "model.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  distckpt::write_text(dir_ / "same" / "model.safetensors", bytes);
  const auto report = verify_both();
  ASSERT_EQ(report.tensors.size(), 1U);
  EXPECT_EQ(report.tensors[0].num_different, 1);
  EXPECT_EQ(report.tensors[0].max_ulps, 256U);  // the lowest bit of the high byte
  EXPECT_FALSE(report.identical());
}

TEST_F(Verify, ReportsASettingThatDiffers) {
  write({});
  auto config = distckpt::read_text(dir_ / "same" / "config.json");
  config.replace(config.find("10000.0"), 7, "20000.0");
  distckpt::write_text(dir_ / "same" / "config.json", config);
  EXPECT_EQ(verify_both().configuration, Lines{"config.json: rope_theta: 10000.0, 20000.0"});
  EXPECT_TRUE(verify_both(/*weights_only=*/true).identical());
}

TEST_F(Verify, ReportsAFileThatDiffers) {
  write({});
  distckpt::write_text(dir_ / "same" / "tokenizer.json", "other");
  EXPECT_EQ(verify_both().files, Lines{"tokenizer.json: differs"});
}

TEST_F(Verify, ReportsAFileOfOneSide) {
  write({});
  distckpt::write_text(dir_ / "same" / "letter.txt", "dear");
  EXPECT_EQ(verify_both().files, Lines{"letter.txt: is on the right only"});
}

// A tied head that one side holds all the same, and that is not the embedding: its ends are two.
class SecondCopy : public Verify {
 protected:
  void SetUp() override {
    write({.tied = true, .repeat_tied_head = true});
    const auto checkpoint = open(dir_ / "same");
    const auto& layout = checkpoint.layout;
    support::corrupt(dir_ / "same" / "model.safetensors",
                     layout.tensor(*layout.find("lm_head.weight")).shards.front().at.offset);
  }
};

TEST_F(SecondCopy, ThatDiffersOnTheRightIsATensorOfItsOwn) {
  const auto report = verify_both();
  ASSERT_EQ(report.unpaired.size(), 1U);
  EXPECT_EQ(report.unpaired.front().tensor, "lm_head.weight");
  EXPECT_EQ(report.unpaired.front().kind, UnpairedTensor::Kind::kOnlyRight);
}

TEST_F(SecondCopy, ThatDiffersOnTheLeftIsATensorOfItsOwn) {
  const auto report = verify({.left = dir_ / "same", .right = dir_ / "hf"});
  ASSERT_EQ(report.unpaired.size(), 1U);
  EXPECT_EQ(report.unpaired.front().kind, UnpairedTensor::Kind::kOnlyLeft);
}

}  // namespace verify_test
}  // namespace ferry::converter
