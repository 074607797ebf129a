// Reports for people: numbers, and the lines of each report.
#include "cli/report/text.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/files.h"

namespace ferry::cli {
namespace text_test {

bool holds(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST(FormatBytes, HasThreeDigitsAndTheUnitThatFits) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(999), "999 B");
  EXPECT_EQ(format_bytes(1000), "1 kB");
  EXPECT_EQ(format_bytes(999'499), "999 kB");
  EXPECT_EQ(format_bytes(999'500), "1 MB");
  EXPECT_EQ(format_bytes(3'090'000'000), "3.09 GB");
  EXPECT_EQ(format_bytes(5'000'000'000'000'000), "5 PB");
}

TEST(FormatSeconds, ChangesUnitsAtAMinuteAndAnHour) {
  EXPECT_EQ(format_seconds(0.44), "0.4 s");
  EXPECT_EQ(format_seconds(59.94), "59.9 s");
  EXPECT_EQ(format_seconds(192.4), "3 min 12 s");
  EXPECT_EQ(format_seconds(3600), "1 h 0 min");
  EXPECT_EQ(format_seconds(90061), "25 h 1 min");
}

TEST(FormatCount, GroupsDigitsByThrees) {
  EXPECT_EQ(format_count(7), "7");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1000), "1,000");
  EXPECT_EQ(format_count(1'543'714'304), "1,543,714,304");
}

TEST(InspectText, SaysWhatACheckpointHolds) {
  const auto report = converter::inspect(support::test_data("llama_tp2pp2"), std::nullopt,
                                         support::test_data("hf_llama") / "hf");
  const auto text = inspect_text(report, "*");
  EXPECT_TRUE(holds(text, "iteration   10\n"));
  EXPECT_TRUE(holds(text, "4 heads of 8, 2 query groups, vocabulary 250, untied output layer\n"));
  EXPECT_TRUE(holds(text, "saved with  TP2 PP2 EP1"));
  EXPECT_TRUE(holds(text, "sidecar     none\n"));
}

TEST(InspectText, CountsTheTensorsThatMatch) {
  const auto report = converter::inspect(support::test_data("hf_llama") / "hf", std::nullopt, {});
  const auto text = inspect_text(report, "*.norm.weight");
  EXPECT_TRUE(holds(text, "tensors     39, 1 of them match\n"));
  EXPECT_TRUE(holds(text, "  model.norm.weight  bf16      [32]                  1 chunk\n"));
  EXPECT_FALSE(holds(text, "lm_head"));
}

TEST(VerifyText, NamesTheFirstElementThatDiffers) {
  const converter::VerifyReport report{.num_compared = 1,
                                       .bytes = 64,
                                       .tensors = {{.tensor = "model.norm.weight",
                                                    .first_element = {3},
                                                    .left_value = 1,
                                                    .right_value = 2,
                                                    .num_different = 1,
                                                    .num_elements = 32,
                                                    .max_difference = 1,
                                                    .max_ulps = 128}}};
  const auto text = verify_text(report);
  EXPECT_TRUE(holds(text,
                    "differs  model.norm.weight: 1 of 32 elements differ, first at [3]: 1, "
                    "2; largest difference 1 (128 ulps)\n"));
  EXPECT_TRUE(holds(text, "different: 1 tensors, 0 settings, 0 files\n"));
}

TEST(VerifyText, CountsTheTensorsBeyondItsLastLine) {
  converter::VerifyReport report;
  for (int i = 0; i < 50; ++i) report.tensors.push_back({.tensor = fmt::format("t{}", i)});
  const auto text = verify_text(report);
  EXPECT_TRUE(holds(text, "differs  t39: "));
  EXPECT_FALSE(holds(text, "t40"));
  EXPECT_TRUE(holds(text, "differs  10 more tensors; --json lists them all\n"));
}

TEST(VerifyText, OfEqualCheckpointsSaysSo) {
  EXPECT_TRUE(holds(verify_text({.num_compared = 39, .bytes = 97'000}),
                    "compared 39 tensors, 97 kB in 0.0 s\nequal: every tensor"));
}

TEST(VerifyText, OfAPartDoesNotSpeakOfEveryTensor) {
  const auto text = verify_text({.num_compared = 12, .is_part = true});
  EXPECT_TRUE(holds(text, "equal: every tensor that was asked for was compared"));
  EXPECT_EQ(text.find("of both"), std::string::npos);
}

TEST(VerifyText, ShowsControlCharactersOfNamesInsteadOfSendingThem) {
  const auto text = verify_text({.tensors = {{.tensor = "a\x1b[2Jb"}}});
  EXPECT_EQ(text.find('\x1b'), std::string::npos);
}

TEST(ConvertText, OfAPlanSaysThatNothingWasWritten) {
  converter::ConvertReport report{.threads = 3, .dry_run = converter::DryRun::kPlan};
  for (int i = 0; i < 20; ++i)
    report.files.push_back({.name = fmt::format("f{}", i), .bytes = 1000});
  const auto text = convert_text(report);
  EXPECT_TRUE(holds(text, "file     f15  1 kB\nfile     and 4 others, 4 kB\n"));
  EXPECT_TRUE(holds(text, "dry run: nothing was written\n"));
  EXPECT_FALSE(holds(text, "copied"));
}

TEST(ConvertText, NamesPaddingThatWasDropped) {
  const auto text =
      convert_text({.proved = true,
                    .nonzero_padding = {{.tensor = "lm_head.weight",
                                         .box = {.offset = {250, 0}, .size = {6, 4}}}}});
  EXPECT_TRUE(holds(text, "lm_head.weight"));
  EXPECT_TRUE(holds(text, "padding that was not zero was dropped\n"));
  EXPECT_TRUE(holds(text, "proved   every tensor"));
}

}  // namespace text_test
}  // namespace ferry::cli
