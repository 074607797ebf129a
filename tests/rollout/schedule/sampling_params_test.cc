#include "rollout/schedule/sampling_params.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <tuple>

#include "distckpt/base/cbor.h"
#include "distckpt/base/error.h"
#include "rollout/schedule/sampling_params_json.h"

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

// Each member, none of which is its default: a new one does not compile here until it is listed.
TEST(SamplingParamsJson, HasEveryMember) {
  const SamplingParams params{.n = 3,
                              .temperature = 0.7,
                              .top_k = 7,
                              .top_p = 0.95,
                              .min_p = 0.1,
                              .repetition_penalty = 1.5,
                              .presence_penalty = -0.5,
                              .frequency_penalty = 0.75,
                              .seed = ~std::uint64_t{0},
                              .stop = {"\xff", "end"},
                              .stop_token_ids = {4, 5},
                              .ignore_eos = true,
                              .max_tokens = 11,
                              .min_tokens = 2,
                              .logprobs = 6,
                              .prompt_logprobs = 0,
                              .return_entropy = true,
                              .return_sampling_mask = true,
                              .structured_outputs = "{}",
                              .logit_bias = {{3, 0.3F}},
                              .allowed_token_ids = {1, 2},
                              .bad_words_token_ids = {{1}, {2, 3}}};
  const auto members = [](const SamplingParams& of) {
    const auto& [n, temperature, top_k, top_p, min_p, repetition, presence, frequency, seed, stop,
                 stop_ids, ignore_eos, max_tokens, min_tokens, logprobs, prompt_logprobs, entropy,
                 mask, structured, bias, allowed, bad_words] = of;
    return std::tuple(n, temperature, top_k, top_p, min_p, repetition, presence, frequency, seed,
                      stop, stop_ids, ignore_eos, max_tokens, min_tokens, logprobs, prompt_logprobs,
                      entropy, mask, structured, bias, allowed, bad_words);
  };
  const auto sent = [](const SamplingParams& one) {
    return from_cbor<SamplingParams>(to_cbor(one));
  };
  EXPECT_EQ(members(sent(params)), members(params));
  EXPECT_EQ(members(sent({})), members({}));
  const nlohmann::json defaults = SamplingParams{}, message = params;
  for (const auto& [name, value] : message.items()) EXPECT_NE(value, defaults.at(name)) << name;
}

TEST(SamplingParamsJson, NeedsEveryMember) {
  const nlohmann::json whole = SamplingParams{};
  for (const auto& [name, value] : whole.items()) {
    auto without = whole;
    without.erase(name);
    EXPECT_THROW((void)without.get<SamplingParams>(), nlohmann::json::exception) << name;
  }
}

}  // namespace sampling_params_test
}  // namespace ferry::rollout
