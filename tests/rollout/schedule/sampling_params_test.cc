#include "rollout/schedule/sampling_params.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>

#include "distckpt/base/error.h"

namespace ferry::rollout {
namespace sampling_params_test {

// The message of verify() for the defaults with one change.
std::string complaint(const std::function<void(SamplingParams&)>& change) {
  SamplingParams params;
  change(params);
  try {
    params.verify();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUsage);
    return error.what();
  }
  return "";
}

TEST(SamplingParams, TheDefaultsAndTheEdgesAreFine) {
  EXPECT_EQ(complaint([](auto&) {}), "");
  EXPECT_EQ(complaint([](auto& p) { p.temperature = 0; }), "");
  EXPECT_EQ(complaint([](auto& p) { p.top_k = -1; }), "");
  EXPECT_EQ(complaint([](auto& p) { p.top_k = 1'000'000'000; }), "");
  EXPECT_EQ(complaint([](auto& p) { p.min_p = 1; }), "");
  EXPECT_EQ(complaint([](auto& p) { p.min_tokens = p.max_tokens; }), "");
  EXPECT_EQ(complaint([](auto& p) { p.logprobs = 0; }), "");
}

TEST(SamplingParams, WhatIsOutOfRangeIsNamed) {
  const std::pair<const char*, std::function<void(SamplingParams&)>> cases[] = {
      {"n:", [](auto& p) { p.n = 0; }},
      {"n:", [](auto& p) { p.n = 20000; }},
      {"temperature:", [](auto& p) { p.temperature = -1; }},
      {"temperature:", [](auto& p) { p.temperature = 1e-4; }},
      {"temperature:", [](auto& p) { p.temperature = NAN; }},
      {"temperature:", [](auto& p) { p.temperature = INFINITY; }},
      {"top_k:", [](auto& p) { p.top_k = -2; }},
      {"top_p:", [](auto& p) { p.top_p = 0; }},
      {"top_p:", [](auto& p) { p.top_p = 1.5; }},
      {"top_p:", [](auto& p) { p.top_p = NAN; }},
      {"min_p:", [](auto& p) { p.min_p = -0.1; }},
      {"repetition_penalty:", [](auto& p) { p.repetition_penalty = 0; }},
      {"presence_penalty:", [](auto& p) { p.presence_penalty = 2.5; }},
      {"frequency_penalty:", [](auto& p) { p.frequency_penalty = NAN; }},
      {"stop:",
       [](auto& p) {
         p.stop = {"end", ""};
       }},
      {"stop_token_ids:", [](auto& p) { p.stop_token_ids = {-1}; }},
      {"max_tokens:", [](auto& p) { p.max_tokens = 0; }},
      {"min_tokens:", [](auto& p) { p.min_tokens = -1; }},
      {"logprobs:", [](auto& p) { p.logprobs = -3; }},
  };
  for (const auto& [field, change] : cases)
    EXPECT_TRUE(complaint(change).starts_with(field)) << field;
}

TEST(SamplingParams, WhatContradictsIsNamed) {
  EXPECT_EQ(complaint([](auto& p) { p.min_tokens = 17; }),
            "min_tokens: 17 are more than max_tokens, 16");
  EXPECT_TRUE(complaint([](auto& p) { p.n = 2, p.temperature = 0; }).starts_with("n: 2 answers"));
  for (const auto& change : std::vector<std::function<void(SamplingParams&)>>{
           [](auto&) {}, [](auto& p) { p.top_p = 0.9, p.presence_penalty = 1; },
           [](auto& p) { p.top_k = 5, p.min_tokens = 2; }, [](auto& p) { p.temperature = 0; }})
    EXPECT_TRUE(complaint([&](auto& p) {
                  p.return_sampling_mask = true;
                  change(p);
                }).starts_with("return_sampling_mask:"));
  for (const auto& [field, change] : std::map<std::string, std::function<void(SamplingParams&)>>{
           {"min_tokens", [](auto& p) { p.min_tokens = 2; }},
           {"allowed_token_ids", [](auto& p) { p.allowed_token_ids = {1}; }},
           {"bad_words", [](auto& p) { p.bad_words_token_ids = {{1}}; }},
           {"return_entropy", [](auto& p) { p.return_entropy = true; }}})
    EXPECT_EQ(complaint([&](auto& p) {
                p.structured_outputs = "{}";
                change(p);
              }),
              field + ": is not supported beside a format of the answer (structured outputs)");
  EXPECT_EQ(complaint([](auto& p) {
              p.structured_outputs = "{}", p.logit_bias = {{1, -100.0F}};
            }),
            "");
  EXPECT_TRUE(complaint([](auto& p) {
                p.return_entropy = true, p.top_k = 5;
              }).starts_with("return_entropy:"));
  EXPECT_EQ(
      complaint([](auto& p) { p.return_entropy = p.return_sampling_mask = true, p.top_k = 5; }),
      "");
}

}  // namespace sampling_params_test
}  // namespace ferry::rollout
