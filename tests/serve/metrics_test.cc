// Counters in Prometheus' text format.
#include "serve/metrics.h"

#include <gtest/gtest.h>

#include <string>

namespace ferry::serve {
namespace metrics_test {

bool holds(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST(Histogram, CountsEachValueInEveryBucketThatHoldsIt) {
  Histogram histogram({1, 2.5});
  for (const double value : {0.5, 1.0, 2.0, 9.0}) histogram.add(value);
  EXPECT_EQ(histogram.text("seconds", "model=\"m\""),
            "seconds_bucket{model=\"m\",le=\"1\"} 2\n"
            "seconds_bucket{model=\"m\",le=\"2.5\"} 3\n"
            "seconds_bucket{model=\"m\",le=\"+Inf\"} 4\n"
            "seconds_count{model=\"m\"} 4\n"
            "seconds_sum{model=\"m\"} 12.5\n");
}

TEST(Metrics, NamesEngineAndModelOfEachCounter) {
  Metrics metrics("m", 2);
  metrics.of(1).prompt_tokens = 7;
  const auto text = metrics.text({EngineStatus{}, EngineStatus{}});
  EXPECT_TRUE(holds(text, "vllm:prompt_tokens_total{engine=\"0\",model_name=\"m\"} 0\n"));
  EXPECT_TRUE(holds(text, "vllm:prompt_tokens_total{engine=\"1\",model_name=\"m\"} 7\n"));
}

TEST(Metrics, EscapeTheNameOfAModel) {
  const Metrics metrics("a\"b\\c", 1);
  EXPECT_TRUE(holds(metrics.text({EngineStatus{}}), "model_name=\"a\\\"b\\\\c\""));
}

TEST(Metrics, KeepTheCountersOfAnEngineThatHasFailed) {
  Metrics metrics("m", 1);
  metrics.of(0).generation_tokens = 5;
  const auto text = metrics.text({std::nullopt});
  EXPECT_TRUE(holds(text, "vllm:generation_tokens_total{engine=\"0\",model_name=\"m\"} 5\n"));
  EXPECT_FALSE(holds(text, "vllm:num_requests_running{engine=\"0\",model_name=\"m\"}"));
}

TEST(Metrics, SayEachKindOnceBeforeItsSamples) {
  const Metrics metrics("m", 2);
  const auto text = metrics.text({EngineStatus{}, EngineStatus{}});
  const std::string kind = "# TYPE vllm:prompt_tokens_total counter\n";
  const auto first = text.find(kind);
  ASSERT_NE(first, std::string::npos);
  EXPECT_EQ(text.find(kind, first + 1), std::string::npos);
}

}  // namespace metrics_test
}  // namespace ferry::serve
