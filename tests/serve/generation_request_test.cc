#include "serve/api/generation_request.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <random>
#include <string>

#include "serve/api/chat_prompt.h"
#include "serve/api/fields.h"

namespace ferry::serve {
namespace generation_request_test {

const ServedModel kModel{.name = "m", .max_model_len = 100, .vocab_size = 50};

GenerationRequest completion(const std::string& json) {
  return parse_completion(parse_object(json), kModel);
}

// The error of a body; "" if there is none.
std::string error_of(const std::string& json) {
  try {
    completion(json);
  } catch (const ApiError& error) {
    return error.what();
  }
  return "";
}

TEST(GenerationRequest, ReadsTheSamplingOfACompletion) {
  const auto request = completion(
      R"({"model": "m", "prompt": [1, 2], "n": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1,
          "seed": -2, "stop_token_ids": [4], "max_tokens": 9, "min_tokens": 2, "logprobs": 2, "ignore_eos": true,
          "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5, "user": "x", "unknown": {}})");
  const auto& params = request.params;
  EXPECT_EQ(request.prompts, (std::vector<std::vector<std::int64_t>>{{1, 2}}));
  EXPECT_EQ(params.n, 3);
  EXPECT_EQ(params.temperature, 0.5);
  EXPECT_EQ(params.top_p, 0.9);
  EXPECT_EQ(params.top_k, 7);
  EXPECT_EQ(params.min_p, 0.1);
  EXPECT_EQ(params.seed, std::uint64_t(-2));
  EXPECT_EQ(params.stop_token_ids, std::vector<std::int64_t>{4});
  EXPECT_EQ(params.max_tokens, 9);
  EXPECT_EQ(params.min_tokens, 2);
  EXPECT_EQ(params.logprobs, 2);
  EXPECT_TRUE(params.ignore_eos);
  EXPECT_EQ(params.presence_penalty, 1);
  EXPECT_EQ(params.frequency_penalty, -1);
  EXPECT_EQ(params.repetition_penalty, 1.5);
}

TEST(GenerationRequest, AWholeNumberIsAnIntegerHoweverItIsWritten) {
  const auto request = completion(R"({"prompt": [1.0], "max_tokens": 3.0, "n": 2e0})");
  EXPECT_EQ(request.params.max_tokens, 3);
  EXPECT_EQ(request.params.n, 2);
  EXPECT_EQ(request.prompts[0], std::vector<std::int64_t>{1});
  for (const char* value : {"3.5", "1e300", "-1e19", "true", "\"3\""})
    EXPECT_NE(error_of(fmt::format(R"({{"prompt": [1], "max_tokens": {}}})", value)), "") << value;
}

TEST(GenerationRequest, ReadsWhatTokensMayBeDrawn) {
  const auto request = completion(
      R"({"prompt": [1, 2, 3], "logit_bias": {"7": -3, "49": 1000}, "allowed_token_ids": [7, 49],
          "truncate_prompt_tokens": 2, "include_stop_str_in_output": true})");
  EXPECT_EQ(request.params.logit_bias,
            (std::vector<std::pair<std::int64_t, float>>{{7, -3.0F}, {49, 100.0F}}));
  EXPECT_EQ(request.params.allowed_token_ids, (std::vector<std::int64_t>{7, 49}));
  EXPECT_EQ(request.prompts, (std::vector<std::vector<std::int64_t>>{{2, 3}}));
  EXPECT_TRUE(request.include_stop_str_in_output);
  for (const char* wrong :
       {R"("logit_bias": {"50": 1})", R"("logit_bias": {"x": 1})", R"("logit_bias": {"7 ": 1})",
        R"("logit_bias": {"7": "1"})", R"("logit_bias": [1])", R"("allowed_token_ids": [])",
        R"("allowed_token_ids": [50])", R"("truncate_prompt_tokens": 0)",
        R"("truncate_prompt_tokens": 101)", R"("bad_words": ["x"])", R"("echo": true)"})
    EXPECT_NE(error_of(fmt::format(R"({{"prompt": [1], {}}})", wrong)), "") << wrong;
}

TEST(GenerationRequest, ASeedOfMinusOneIsNone) {
  EXPECT_FALSE(completion(R"({"prompt": [1], "seed": -1})").params.seed);
}

TEST(GenerationRequest, TruncatesAPromptOnEitherSide) {
  const auto kept = [](const char* side) {
    return completion(
               fmt::format(
                   R"({{"prompt": [1, 2, 3], "truncate_prompt_tokens": 2, "truncation_side": {}}})",
                   side))
        .prompts[0];
  };
  EXPECT_EQ(kept(R"("left")"), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(kept(R"("right")"), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(kept("null"), (std::vector<std::int64_t>{2, 3}));
  EXPECT_NE(error_of(R"({"prompt": [1], "truncation_side": "middle"})"), "");
}

TEST(GenerationRequest, RefusesByNameWhatWouldChangeTheAnswer) {
  for (const char* name : {"prompt_embeds", "logprob_token_ids", "thinking_token_budget"})
    EXPECT_EQ(error_of(fmt::format(R"({{"prompt": [1], "{}": 1}})", name)),
              fmt::format("{}: is not supported", name));
}

TEST(GenerationRequest, AsksForTheLogProbsOfAPrompt) {
  const auto request = completion(R"({"prompt": [1, 2], "prompt_logprobs": 3, "logprobs": 5})");
  EXPECT_EQ(request.prompt_logprobs, 3);
  EXPECT_EQ(request.params.prompt_logprobs, 3);
  EXPECT_FALSE(completion(R"({"prompt": [1, 2], "logprobs": 5})").params.prompt_logprobs);
  for (const char* wrong : {R"("prompt_logprobs": -1)", R"("prompt_logprobs": 21)",
                            R"("prompt_logprobs": 1, "stream": true)", R"("max_tokens": 0)"})
    EXPECT_NE(error_of(fmt::format(R"({{"prompt": [1], {}}})", wrong)), "") << wrong;
}

TEST(GenerationRequest, NullIsAbsence) {
  const auto request =
      completion(R"({"prompt": [1], "max_tokens": null, "seed": null, "stop": null})");
  EXPECT_EQ(request.params.max_tokens, 16);
  EXPECT_FALSE(request.params.seed);
}

TEST(GenerationRequest, AChatMayHaveAllTokensThatThereIsRoomFor) {
  const auto request =
      parse_chat_completion(parse_object(R"({"prompt_token_ids": [1, 2, 3]})"), kModel);
  EXPECT_EQ(request.params.max_tokens, 97);
}

TEST(GenerationRequest, JoinsThePartsOfAText) {
  const auto messages = chat_messages(parse_object(
      R"({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "a"},
          {"type": "refusal", "refusal": "no"}, {"type": "input_text", "text": "b"}]}]})"));
  EXPECT_EQ(messages[0]["content"], "a\nno\nb");
}

TEST(GenerationRequest, NamesTheFieldThatIsWrong) {
  EXPECT_EQ(error_of(R"({"prompt": [1], "n": 1.5})"), "n: is not an integer of 64 bits");
  EXPECT_EQ(error_of(R"({"prompt": [1], "n": 18446744073709551615})"),
            "n: is not an integer of 64 bits");
  EXPECT_EQ(error_of(R"({"prompt": [1], "top_p": 2})"), "top_p: 2 is not in (0, 1]");
  EXPECT_EQ(error_of(R"({"prompt": [50]})"), "prompt: 50 is no token of the model");
  EXPECT_EQ(error_of(R"({"prompt": "text"})"), "the model has no tokenizer: prompts are token ids");
  EXPECT_EQ(error_of(R"({"prompt": [1], "stream": true, "stream_options": {"include_usage": 1}})"),
            "stream_options.include_usage: is not true or false");
  EXPECT_EQ(error_of(R"({"prompt": [1], "suffix": "x"})"), "suffix: is not supported");
  EXPECT_EQ(error_of(R"({"prompt": [1], "stop_token_ids": [4, 50]})"),
            "stop_token_ids: 50 is no token of the model");
  EXPECT_EQ(error_of(R"({"prompt": [1], "length_penalty": 2})"),
            "length_penalty: is not supported");
  EXPECT_EQ(error_of(R"({"prompt": [1], "length_penalty": 1, "modalities": ["text"]})"), "");
  EXPECT_EQ(error_of(R"({"prompt": [1], "modalities": ["text", "audio"]})"),
            "modalities: has others than \"text\", which are not supported");
  EXPECT_EQ(error_of(R"({"prompt": [1], "max_tokens": 100})"),
            "the model takes 100 tokens, and the prompt has 1, max_tokens 100");
  EXPECT_EQ(error_of(R"({"model": "x", "prompt": [1]})"), "the model `x` does not exist");
  EXPECT_EQ(error_of("[]"), "the body is no JSON object");
}

ordered_json error_of_chat(const std::string& fields, const ServedModel& model = kModel) {
  try {
    parse_chat_completion(parse_object("{" + fields + "}"), model);
  } catch (const ApiError& error) {
    return ordered_json::parse(error.body()).at("error");
  }
  return nullptr;
}

TEST(GenerationRequest, NamesAFieldAsTheClientDoes) {
  const auto param_of = [](const std::string& field) {
    return error_of_chat(R"("prompt_token_ids": [1], "stream": true, )" + field).at("param");
  };
  EXPECT_EQ(param_of(R"("stream_options": 1)"), "stream_options");
  EXPECT_EQ(param_of(R"("max_completion_tokens": 0)"), "max_completion_tokens");
  EXPECT_EQ(param_of(R"("max_tokens": 0)"), "max_tokens");
  EXPECT_EQ(param_of(R"("tools": [4])"), "tools.0");
}

TEST(GenerationRequest, IsAsLongAsTheCacheHolds) {
  const ServedModel model{.max_model_len = 10, .is_limited_by_cache = true, .vocab_size = 50};
  const auto request =
      parse_chat_completion(parse_object(R"({"prompt_token_ids": [1, 2]})"), model);
  EXPECT_EQ(request.params.max_tokens, 8);
  const auto error = error_of_chat(R"("prompt_token_ids": [1, 2], "max_tokens": 9)", model);
  EXPECT_EQ(error.at("code"), "context_length_exceeded");
  EXPECT_EQ(error.at("message"),
            "the KV cache holds 10 tokens, and the prompt has 2, max_tokens 9");
}

TEST(GenerationRequest, RefusesNestingThatNoRecursionSurvives) {
  EXPECT_EQ(error_of(std::string(1'000'000, '[')), "the body is nested more than 100 deep");
  // In the time of its length: with a look at all other members for each, this takes minutes.
  std::string members;
  for (int i = 0; i < 400'000; ++i) members += fmt::format(R"("member{}": 1, )", i);
  EXPECT_EQ(error_of("{" + members + R"("prompt": [50]})"), "prompt: 50 is no token of the model");
  EXPECT_EQ(error_of(R"({"a": "[[[[{{{{", "prompt": [1]})"), "");
}

TEST(GenerationRequest, AnyBytesAreAnAnswerOrAnError) {
  const std::string body =
      R"({"model": "m", "prompt": [[1, 2], [3]], "n": 3, "temperature": 0.5, "stop": [], "seed": 5, "stream": true,
          "stream_options": {"include_usage": true}, "logprobs": 2})";
  std::mt19937 random(7);
  int refused = 0;
  for (int i = 0; i < 20000; ++i) {
    auto text = body;
    const auto at = random() % text.size();
    if (i % 3 == 0) text.erase(at, 1 + random() % 5);
    if (i % 3 == 1) text[at] = static_cast<char>(random());
    if (i % 3 == 2) text.insert(at, text.substr(random() % text.size(), random() % 20));
    refused += error_of(text).empty() ? 0 : 1;
  }
  EXPECT_GT(refused, 5000);
  EXPECT_LT(refused, 20000);
}

TEST(GenerationRequest, NamesAToolThatIsNoFunction) {
  const auto error_with = [](const std::string& tool) -> std::string {
    try {
      parse_chat_completion(
          parse_object(fmt::format(R"({{"prompt_token_ids": [1], "tools": [{}]}})", tool)), kModel);
    } catch (const ApiError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(error_with(R"({"type": "function", "function": {"name": "f"}})"), "");
  EXPECT_EQ(error_with(R"({"function": {"name": "f", "parameters": null}})"), "");
  EXPECT_EQ(error_with(R"({"type": "custom", "custom": {"name": "f"}})"),
            "tools.0.type: is not \"function\": others are not supported");
  EXPECT_EQ(error_with(R"({"name": "f"})"), "tools.0.function: is missing");
  EXPECT_EQ(error_with(R"({"function": {}})"), "tools.0.function: has no name");
  EXPECT_EQ(error_with(R"({"function": {"name": 3}})"), "tools.0.function.name: is not a string");
  EXPECT_NE(error_with("3"), "");
}

}  // namespace generation_request_test
}  // namespace ferry::serve
