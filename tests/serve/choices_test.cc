#include "serve/api/choices.h"

#include <gtest/gtest.h>

#include <limits>

namespace ferry::serve {
namespace choices_test {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::string answer_of(GenerationRequest request) {
  const ServedModel model{.name = "m", .max_model_len = 100, .vocab_size = 50};
  TokenTexts texts(nullptr);
  request.prompts = {{4, 7, 8}};
  request.prompt_logprobs = 2;
  AnswerWriter writer(request, model, texts, "id", 5);
  return writer.whole({{.finish_reason = rollout::FinishReason::kLength}}, {}, 3,
                      {{{.token_id = 7, .logprob = -0.1F, .rank = 1, .top = {{7, -0.1F}, {9, -2}}},
                        {.token_id = 8, .logprob = -kInfinity, .rank = 3}}});
}

TEST(AnswerWriter, WritesTheLogprobsOfAPromptAsJson) {
  const auto entry = [](std::int64_t id, const ordered_json& logprob, std::int64_t rank) {
    return ordered_json{
        {"logprob", logprob}, {"rank", rank}, {"decoded_token", "token_id:" + std::to_string(id)}};
  };
  const ordered_json expected{nullptr,
                              {{"7", entry(7, -0.1F, 1)}, {"9", entry(9, -2.0, 2)}},
                              {{"8", entry(8, -9999.0, 3)}}};
  const auto completion = ordered_json::parse(answer_of({}));
  EXPECT_EQ(completion["choices"][0]["prompt_logprobs"].dump(), expected.dump());
  EXPECT_EQ(completion["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(completion["system_fingerprint"], "weights-3");
  const auto chat = ordered_json::parse(answer_of({.is_chat = true}));
  EXPECT_EQ(chat["prompt_logprobs"].dump(), expected.dump());
  EXPECT_EQ(chat["choices"].size(), 1U);
}

}  // namespace choices_test
}  // namespace ferry::serve
