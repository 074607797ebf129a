// The report of verify --logits, of differences that the test has made up.
#include "cli/torch/report/logits_report.h"

#include <gtest/gtest.h>

#include <string>

namespace ferry::cli {
namespace logits_report_test {

using converter::LogitsReport;

LogitsSubject subject() {
  return {.checkpoint = "hf",
          .reference = "ref.safetensors",
          .family = "llama",
          .alignment = "bitwise",
          .dtype = "bf16",
          .device = "cpu",
          .mesh = {{.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}, 8}};
}

LogitsReport equal_report() {
  return {.regime = R"({"torch": "2.11.0", "transformers": "5.17.0", "other": 1})",
          .sequences = {{.num_tokens = 5,
                         .logits = {.module = "logits", .elements = 1250},
                         .modules = {{.module = "embedding", .elements = 80},
                                     {.module = "decoder.layers.1", .elements = 80}}}}};
}

LogitsReport other_report() {
  auto report = equal_report();
  auto& sequence = report.sequences[0];
  sequence.logits.unequal = 1250;
  sequence.logits.largest = 0.125;
  sequence.logits.largest_ulps = 4096;
  sequence.largest_log_prob = 0.5;
  sequence.mean_log_prob = 0.25;
  sequence.modules[1].unequal = 3;
  sequence.modules[1].finite = false;
  return report;
}

bool has(const std::string& text, const std::string& words) {
  return text.find(words) != std::string::npos;
}

TEST(LogitsText, SaysEqualAndWhatWasCompared) {
  EXPECT_EQ(logits_text(subject(), equal_report()),
            "model      hf (llama), bitwise bf16 on cpu, tp 2, pp 2, dp 2\n"
            "reference  ref.safetensors (transformers 5.17.0, torch 2.11.0)\n"
            "sequence   0, 5 tokens: logits equal in every bit\n"
            "EQUAL\n");
}

TEST(LogitsText, NamesTheFirstModuleThatDiffers) {
  EXPECT_EQ(logits_text(subject(), other_report()),
            "model      hf (llama), bitwise bf16 on cpu, tp 2, pp 2, dp 2\n"
            "reference  ref.safetensors (transformers 5.17.0, torch 2.11.0)\n"
            "sequence   0, 5 tokens: logits 1,250 of 1,250 values differ, by 0.125 at most "
            "(4,096 ulps)\n"
            "           log-probabilities differ by 0.5 at most, 0.25 in the mean\n"
            "first      decoder.layers.1 of sequence 0: 3 of 80 values differ, and ours are not "
            "all finite\n"
            "DIFFERENT\n");
}

TEST(LogitsText, ShowsARegimeThatIsNoJsonAsItIs) {
  auto report = equal_report();
  report.regime = "by hand";
  EXPECT_TRUE(has(logits_text(subject(), report), "ref.safetensors (by hand)\n"));
}

TEST(LogitsText, SaysHowTokensAndExpertsAreShared) {
  auto given = subject();
  given.sequence_parallel = true;
  given.mesh = {{.tensor_model_parallel_size = 2,
                 .expert_model_parallel_size = 2,
                 .expert_tensor_parallel_size = 1},
                2};
  auto report = equal_report();
  report.packed = true;
  const auto text = logits_text(given, report);
  EXPECT_TRUE(has(text, "tp 2 (sequence parallel), ep 2, etp 1\n")) << text;
  EXPECT_TRUE(has(text, "5 tokens, packed: logits")) << text;
}

TEST(LogitsJson, HasEveryNumber) {
  const auto json = logits_json(subject(), other_report());
  EXPECT_EQ(json.at("equal"), false);
  EXPECT_EQ(json.at("mesh").at("dp"), 2);
  EXPECT_EQ(json.at("regime").at("torch"), "2.11.0");
  const auto& sequence = json.at("sequences").at(0);
  EXPECT_EQ(sequence.at("tokens"), 5);
  EXPECT_EQ(sequence.at("logits").at("ulps"), 4096);
  EXPECT_EQ(sequence.at("largest_log_prob"), 0.5);
  EXPECT_EQ(sequence.at("modules").at(1).at("module"), "decoder.layers.1");
  EXPECT_EQ(sequence.at("modules").at(1).at("finite"), false);
  EXPECT_EQ(json.at("first_difference").at("module"), "decoder.layers.1");
}

TEST(LogitsJson, NamesNoDifferenceWhereAllIsEqual) {
  auto report = equal_report();
  report.regime = "by hand";
  const auto json = logits_json(subject(), report);
  EXPECT_EQ(json.at("equal"), true);
  EXPECT_FALSE(json.contains("first_difference"));
  EXPECT_EQ(json.at("regime"), "by hand");
}

TEST(LogitsHtml, HasABarForEachModule) {
  const auto html = logits_html(subject(), other_report());
  EXPECT_TRUE(has(html, "Not equal"));
  EXPECT_TRUE(has(html, "decoder.layers.1: 3 of 80 values differ"));
  EXPECT_TRUE(has(html, "embedding: 0 of 80 values differ"));
  EXPECT_TRUE(has(html, "class=\"bar equal\""));
  EXPECT_TRUE(has(html, "differs first, in sequence 0"));
  EXPECT_TRUE(has(logits_html(subject(), equal_report()), "Equal in every bit"));
}

TEST(LogitsHtml, EscapesNames) {
  auto report = other_report();
  report.sequences[0].modules[1].module = "<iframe>";
  auto given = subject();
  given.checkpoint = "<script>";
  const auto html = logits_html(given, report);
  EXPECT_FALSE(has(html, "<script>"));
  EXPECT_FALSE(has(html, "<iframe>"));
}

}  // namespace logits_report_test
}  // namespace ferry::cli
