// The report of a difference: its numbers, its tables, its page.
#include "cli/report/diff.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "cli/report/heat_map.h"
#include "cli/report/json.h"

namespace ferry::cli {
namespace diff_test {

using converter::DiffReport;
using distckpt::ElementCounts;
using distckpt::ElementDifference;

bool holds(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

// `different` of `elements` differ by a step of their dtype.
ElementDifference changed(std::int64_t elements, std::int64_t different) {
  ElementDifference difference{.counts = {.elements = elements, .different = different}};
  difference.counts.ulps[0] = elements - different;
  difference.counts.ulps[1] = different;
  if (different > 0) {
    difference.counts.max_difference = 0.5;
    difference.counts.max_ulps = 1;
  }
  difference.squares = {.left = 4, .right = 4, .difference = different > 0 ? 0.04 : 0};
  return difference;
}

DiffReport report() {
  DiffReport report{.left = "a", .right = "b", .family = "llama", .num_changed = 1};
  report.tensors.push_back(
      {.name = "model.layers.0.mlp.up_proj.weight", .shape = {4, 5}, .difference = changed(20, 0)});
  report.tensors.push_back(
      {.name = "model.layers.1.mlp.up_proj.weight", .shape = {4, 5}, .difference = changed(20, 5)});
  for (const auto& tensor : report.tensors) report.total += tensor.difference;
  return report;
}

TEST(FormatShare, IsNeverRoundedToAllOrNothing) {
  EXPECT_EQ(format_share(0), "equal");
  EXPECT_EQ(format_share(1), "100%");
  EXPECT_EQ(format_share(0.99999), ">99.9%");
  EXPECT_EQ(format_share(0.00012), "0.012%");
  EXPECT_EQ(format_share(0.26), "26%");
}

TEST(FormatBucket, NamesDistancesInUlps) {
  EXPECT_EQ(format_bucket(0), "0");
  EXPECT_EQ(format_bucket(2), "2");
  EXPECT_EQ(format_bucket(3), "3-4");
  EXPECT_EQ(format_bucket(4), "5-8");
}

TEST(FormatNonfinite, NamesTheSide) {
  EXPECT_EQ(format_nonfinite({}), "");
  EXPECT_EQ(format_nonfinite({.left_nans = 2, .right_nans = 1, .right_infinities = 1}),
            "A: 2 NaN; B: 1 NaN, 1 Inf");
}

TEST(FormatExperts, NamesTheOneThatChangedMost) {
  EXPECT_EQ(format_experts({.num_tensors = 1, .num_changed = 1}), "");
  EXPECT_EQ(format_experts({.num_tensors = 64, .num_changed = 3, .worst_expert = 17}),
            "3 of 64 experts changed, most 17");
  EXPECT_EQ(format_experts({.num_tensors = 64, .worst_expert = 0}), "64 experts");
}

TEST(NumBuckets, EndsBehindTheLastThatIsNotEmpty) {
  ElementCounts counts;
  EXPECT_EQ(num_buckets(counts), 0U);
  counts.ulps[4] = 1;
  EXPECT_EQ(num_buckets(counts), 5U);
}

TEST(DiffText, HasALineForEachLayerAndForEachTensorThatChanged) {
  const auto text = diff_text(report(), DiffOrder::kLayer);
  EXPECT_TRUE(holds(text,
                    "changed  1 tensors, 5 elements (12.5%); relative difference 0.07071, "
                    "largest 0.5, 1 ulps\n"));
  EXPECT_TRUE(holds(text, "\n0       0 of 1"));
  EXPECT_TRUE(holds(text, "\n1       1 of 1"));
  EXPECT_TRUE(holds(text, "model.layers.1.mlp.up_proj.weight"));
  EXPECT_FALSE(holds(text, "model.layers.0.mlp.up_proj.weight"));
}

TEST(DiffText, OfEqualCheckpointsHasNoTables) {
  DiffReport equal = report();
  equal.num_changed = 0;
  const auto text = diff_text(equal, DiffOrder::kLayer);
  EXPECT_TRUE(text.ends_with("equal: no element differs\n"));
  equal.unpaired.push_back({.tensor = "lm_head.weight"});
  EXPECT_TRUE(diff_text(equal, DiffOrder::kLayer)
                  .ends_with("no element of the tensors that both hold differs\n"));
}

TEST(DiffText, ThatComparedNothingSaysSo) {
  DiffReport other = report();
  other.num_changed = 0;
  other.tensors.clear();
  other.unpaired.push_back({.tensor = "lm_head.weight"});
  EXPECT_TRUE(holds(diff_text(other, DiffOrder::kLayer), "no tensor could be compared"));
}

TEST(StepClass, TakesTheUpperEndOfAStepIntoIt) {
  const auto& scale = changed_share_scale();
  EXPECT_EQ(step_class(changed(100, 0), scale), "s0");
  EXPECT_EQ(step_class(changed(100, 1), scale), "s3");  // 0.01, included
  EXPECT_EQ(step_class(changed(100, 2), scale), "s4");
  EXPECT_EQ(step_class(changed(100, 100), scale), "s7");
}

TEST(DiffHtml, EscapesNamesAndShowsACellForEachTensor) {
  auto one = report();
  one.left = "<script>";
  const auto html = diff_html(one);
  EXPECT_FALSE(holds(html, "<script>"));
  EXPECT_TRUE(holds(html, "&lt;script&gt;"));
  EXPECT_TRUE(holds(html, "model.layers.1.mlp.up_proj"));
  EXPECT_TRUE(holds(html, "changed: 5 of 20 elements (25%)"));
}

TEST(DiffJson, ListsAllTensorsAndTheBucketsThatAreNotEmpty) {
  const auto json = diff_json(report());
  EXPECT_EQ(json["changed_tensors"], 1);
  ASSERT_EQ(json["tensors"].size(), 2U);
  EXPECT_EQ(json["tensors"][1]["changed_share"], 0.25);
  EXPECT_EQ(json["tensors"][1]["ulps"].dump(), R"({"0":15,"1":5})");
  EXPECT_TRUE(json["tensors"][0]["max_ulps"].is_null());
}

TEST(JsonText, WritesNamesThatAreNotUtf8) {
  EXPECT_EQ(json_text({{"name", "a\xff"}}, -1), "{\"name\":\"a\xef\xbf\xbd\"}");
}

TEST(ErrorJson, HasKindMessageContextAndHint) {
  Error error(ErrorKind::kLayout, "a: b", "do c");
  error.add_context("reading d");
  const auto json = error_json(error);
  const auto text = json.dump();
  for (const auto* part : {"\"a: b\"", "\"do c\"", "\"reading d\"", "\"layout\""})
    EXPECT_TRUE(holds(text, part)) << text;
}

}  // namespace diff_test
}  // namespace ferry::cli
