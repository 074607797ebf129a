// The certificate of verify --numerics as it is told.
#include "cli/torch/report/numerics_report.h"

#include <gtest/gtest.h>

#include <string>

namespace ferry::cli {
namespace numerics_report_test {

models::NumericsCertificate certificate(bool passes) {
  return {.environment = {{"device", "cpu"}},
          .checks = {{.subject = "linear_fc2 16x24", .property = "rows", .passed = true},
                     {.subject = "RMSNorm 16",
                      .property = "rows",
                      .passed = passes,
                      .detail = passes ? "" : "2 rows"}},
          .transformers = {{.subject = "linear_qkv", .property = "values", .passed = false}},
          .kernels = {"gemm 16"},
          .seconds = 2};
}

TEST(NumericsText, HasALineForEachCheck) {
  EXPECT_EQ(numerics_text(certificate(true)),
            "device       cpu\n"
            "pass   linear_fc2 16x24                         rows\n"
            "pass   RMSNorm 16                               rows\n"
            "other  linear_qkv                               values\n"
            "kernel gemm 16\n"
            "2 checks in 2.0 s\n"
            "PASS\n");
}

TEST(NumericsText, SaysWhichCheckFailsAndHowFar) {
  const auto text = numerics_text(certificate(false));
  EXPECT_NE(text.find("FAIL   RMSNorm 16                               rows: 2 rows\n"),
            std::string::npos)
      << text;
  EXPECT_TRUE(text.ends_with("FAIL\n"));
}

TEST(NumericsJson, HasEveryCheck) {
  const auto json = numerics_json(certificate(false));
  EXPECT_EQ(json.at("passed"), false);
  EXPECT_EQ(json.at("environment").at("device"), "cpu");
  EXPECT_EQ(json.at("checks").at(1).at("detail"), "2 rows");
  EXPECT_EQ(json.at("equals_transformers"), false);
  EXPECT_EQ(json.at("transformers").at(0).at("subject"), "linear_qkv");
  EXPECT_EQ(json.at("kernels").at(0), "gemm 16");
}

// transformers' own kernels decide nothing.
TEST(NumericsJson, PassesWhereOurChecksDo) {
  EXPECT_EQ(numerics_json(certificate(true)).at("passed"), true);
}

}  // namespace numerics_report_test
}  // namespace ferry::cli
