#include "converter/alignment/logits_check.h"

#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "converter/alignment/model_files.h"
#include "models/distributed/parallel_state.h"
#include "models/pipeline_forward.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace logits_check_test {

using support::fails;

TEST(CompareTensors, FindsNothingBetweenEqualOnes) {
  const auto x = at::tensor({1.F, -2.F, 0.F});
  const auto found = compare_tensors("logits", x, x.clone());
  EXPECT_EQ(found.elements, 3);
  EXPECT_EQ(found.unequal, 0);
  EXPECT_EQ(found.largest_ulps, 0);
}

TEST(CompareTensors, CountsStepsBetweenNeighbours) {
  const auto next = std::nextafter(1.F, 2.F);
  const auto found = compare_tensors("m", at::tensor({1.F, 5.F}), at::tensor({next, 5.F}));
  EXPECT_EQ(found.unequal, 1);
  EXPECT_EQ(found.largest_ulps, 1);
  EXPECT_EQ(found.largest, static_cast<double>(next) - 1);
}

TEST(CompareTensors, CountsStepsAcrossZero) {
  const auto least = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(compare_tensors("m", at::tensor({-least}), at::tensor({least})).largest_ulps, 2);
}

TEST(CompareTensors, TellsTheSignsOfZeroApart) {
  const auto found = compare_tensors("m", at::tensor({0.F}), at::tensor({-0.F}));
  EXPECT_EQ(found.unequal, 1);
  EXPECT_EQ(found.largest, 0);
}

TEST(CompareTensors, TakesAnyNanForAnother) {
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  const auto found = compare_tensors("m", at::tensor({nan}), at::tensor({-nan}));
  EXPECT_EQ(found.unequal, 0);
  EXPECT_FALSE(found.finite);
}

TEST(CompareTensors, NamesTheModuleOfAnotherShape) {
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"decoder.layers.0", "[2, 3]", "[3, 2]"}, [] {
    compare_tensors("decoder.layers.0", at::zeros({2, 3}), at::zeros({3, 2}));
  }));
}

TEST(CompareTensors, NamesTheModuleOfAnotherDType) {
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"logits", "Float", "BFloat16"}, [] {
    compare_tensors("logits", at::zeros({2}), at::zeros({2}, at::kBFloat16));
  }));
}

TEST(LogitsReport, NamesTheFirstModuleThatDiffers) {
  LogitsReport report{.sequences = {{.logits = {.module = "logits"}},
                                    {.logits = {.module = "logits", .unequal = 5},
                                     .modules = {{.module = "embedding"},
                                                 {.module = "decoder.layers.0", .unequal = 1}}}}};
  EXPECT_FALSE(report.equal());
  const auto first = report.first_difference();
  ASSERT_TRUE(first.has_value());
  EXPECT_EQ(first->first, 1U);
  EXPECT_EQ(first->second.module, "decoder.layers.0");
}

TEST(LogitsReport, ComparesLogitsAfterModules) {
  LogitsReport report{.sequences = {{.logits = {.module = "logits", .unequal = 5},
                                     .modules = {{.module = "embedding"}}}}};
  EXPECT_EQ(report.first_difference()->second.module, "logits");
  report.sequences[0].logits.unequal = 0;
  EXPECT_TRUE(report.equal());
  EXPECT_FALSE(report.first_difference().has_value());
}

// A tiny model of one rank, and a reference of zeros that it does not meet.
class CheckLogits : public testing::Test {
 protected:
  CheckLogits() {
    support::write_tiny_model({}, dir_ / "hf", 1);
    const auto checkpoint = open(dir_ / "hf");
    vocabulary_ = checkpoint.map.config.vocab_size;
    chunks_ = models::make_stage(
        checkpoint.map.config, mesh_,
        {.alignment = models::Alignment::kBitwise, .dtype = distckpt::DType::kF32});
    load_model(chunks_, checkpoint, {.round = true});
    for (const std::int64_t length : {3, 5}) {
      reference_.sequences.push_back({.tokens = at::full({length}, 7, at::kLong),
                                      .logits = at::zeros({length, vocabulary_}, at::kFloat)});
    }
  }

  support::TempDir dir_;
  models::World world_ = models::World::from_environment({});
  models::ParallelState mesh_{world_, {}, "test"};
  std::vector<std::unique_ptr<models::GPTModel>> chunks_;
  std::int64_t vocabulary_ = 0;
  Reference reference_{.regime = "zeros"};
};

TEST_F(CheckLogits, CountsTheElementsOfEachSequence) {
  const auto report = check_logits(chunks_, reference_, {});
  EXPECT_EQ(report.regime, "zeros");
  ASSERT_EQ(report.sequences.size(), 2U);
  EXPECT_EQ(report.sequences[1].num_tokens, 5);
  EXPECT_EQ(report.sequences[1].logits.elements, 5 * vocabulary_);
  EXPECT_FALSE(report.equal());
  EXPECT_GT(report.sequences[0].largest_log_prob, 0);
}

TEST_F(CheckLogits, GivesTheSameInOneBatch) {
  const auto apart = check_logits(chunks_, reference_, {});
  const auto packed = check_logits(chunks_, reference_, {.packed = true});
  EXPECT_TRUE(packed.packed);
  for (std::size_t i = 0; i < 2; ++i)
    EXPECT_EQ(packed.sequences[i].logits.largest, apart.sequences[i].logits.largest);
}

TEST_F(CheckLogits, ComparesTheModulesThatTheReferenceHas) {
  const auto hidden = chunks_.front()->config().hidden_size;
  reference_.sequences[0].hidden["embedding"] = at::zeros({3, hidden}, at::kFloat);
  const auto report = check_logits(chunks_, reference_, {});
  ASSERT_EQ(report.sequences[0].modules.size(), 1U);
  EXPECT_EQ(report.sequences[0].modules[0].module, "embedding");
  EXPECT_TRUE(report.sequences[1].modules.empty());
}

TEST_F(CheckLogits, RefusesAReferenceOfAnotherVocabulary) {
  reference_.sequences[0].logits = at::zeros({3, vocabulary_ + 1}, at::kFloat);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"a vocabulary of"},
                    [&] { check_logits(chunks_, reference_, {}); }));
}

TEST_F(CheckLogits, RefusesATokenThatTheModelLacks) {
  reference_.sequences[1].tokens = at::full({5}, vocabulary_, at::kLong);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {fmt::format("the reference has token {}", vocabulary_)},
                    [&] { check_logits(chunks_, reference_, {}); }));
}

TEST_F(CheckLogits, RefusesPredictionsOfALayerThatTheModelLacks) {
  reference_.sequences[0].predicted["mtp.layers.0"] = at::zeros({3, vocabulary_}, at::kFloat);
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"predictions of mtp.layers.0"},
                    [&] { check_logits(chunks_, reference_, {}); }));
}

}  // namespace logits_check_test
}  // namespace ferry::converter
