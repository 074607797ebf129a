#include "rollout/output_processor.h"

#include <map>

#include "tests/rollout/text/tokenizer/tiny_tokenizers.h"
#include "tests/rollout/tiny_engine.h"
#include "tests/support/expect.h"
#include "tests/support/models/engine_load.h"

namespace ferry::rollout {
namespace output_processor_test {

class Outputs : public TinyEngineTest {
 protected:
  // One letter for each token of the model.
  static std::string file() {
    constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX";
    std::vector<std::string> tokens;
    for (const char letter : kLetters) tokens.emplace_back(1, letter);
    auto json = text::character_tokenizer(tokens, {});
    json["decoder"] = {{"type", "Fuse"}};
    return json.dump();
  }

  std::map<std::string, Answer> run(const OutputProcessor::OnText& on_text = {}) {
    std::map<std::string, Answer> answers;
    while (processor_.has_unfinished()) {
      for (auto& answer : processor_.step(on_text)) {
        answers.emplace(answer.request_id, std::move(answer));
      }
    }
    return answers;
  }
  Answer answer(const SamplingParams& params, const OutputProcessor::OnText& on_text = {}) {
    EXPECT_FALSE(processor_.add_request("a", prompt_, params));
    return run(on_text).at("a");
  }
  std::string text_of(const std::vector<TokenOutput>& tokens) const {
    std::vector<text::TokenId> ids;
    for (const auto& token : tokens) ids.push_back(static_cast<text::TokenId>(token.token_id));
    return tokenizer_.decode(ids);
  }

  const std::vector<std::int64_t> prompt_ = support::random_prompt(10, kVocabulary, 1);
  const SamplingParams sampled_{.seed = 3, .max_tokens = 30};
  text::Tokenizer tokenizer_{file(), "t.json"};
  LLMEngine engine_{model_, {.num_blocks = 20}};
  OutputProcessor processor_{engine_, &tokenizer_};
};

TEST_F(Outputs, ReasonsHaveTheNamesOfVllm) {
  EXPECT_EQ(to_string(FinishReason::kStop), "stop");
  EXPECT_EQ(to_string(FinishReason::kLength), "length");
  EXPECT_EQ(to_string(FinishReason::kNone), "");
}

TEST_F(Outputs, AnAnswerHasTheTextOfItsTokens) {
  const auto found = answer(sampled_);
  ASSERT_EQ(found.completions.size(), 1);
  EXPECT_EQ(found.completions[0].tokens.size(), 30);
  EXPECT_EQ(found.completions[0].text, text_of(found.completions[0].tokens));
  EXPECT_EQ(found.completions[0].finish_reason, FinishReason::kLength);
}

TEST_F(Outputs, ThePartsOfATextMakeTheText) {
  std::string parts;
  const auto found =
      answer(sampled_, [&](const auto&, std::int64_t, std::string_view part) { parts += part; });
  EXPECT_EQ(parts, found.completions[0].text);
}

TEST_F(Outputs, AStopStringEndsTheTextBeforeIt) {
  const auto whole = answer(sampled_).completions[0].text;
  auto params = sampled_;
  params.stop = {whole.substr(8, 2)};
  const auto found = answer(params).completions[0];
  EXPECT_EQ(found.text, whole.substr(0, whole.find(params.stop[0])));
  EXPECT_EQ(found.stop_string, params.stop[0]);
  EXPECT_EQ(found.finish_reason, FinishReason::kStop);
}

TEST_F(Outputs, AStopTokenIsNoPartOfTheText) {
  const auto whole = answer(sampled_).completions[0];
  auto params = sampled_;
  params.stop_token_ids = {whole.tokens[8].token_id};
  const auto found = answer(params).completions[0];
  EXPECT_EQ(found.stop_token, whole.tokens[8].token_id);
  EXPECT_EQ(found.tokens.size(), found.text.size() + 1);
}

TEST_F(Outputs, EachSampleHasItsText) {
  auto params = sampled_;
  params.n = 3;
  const auto found = answer(params);
  ASSERT_EQ(found.completions.size(), 3);
  for (const auto& completion : found.completions) {
    EXPECT_EQ(completion.text, text_of(completion.tokens));
  }
}

TEST_F(Outputs, AStopStringEndsItsSampleOnly) {
  auto params = sampled_;
  params.n = 2;
  const auto whole = answer(params);
  params.stop = {whole.completions[0].text.substr(5, 3)};
  const auto found = answer(params);
  EXPECT_EQ(found.completions[0].finish_reason, FinishReason::kStop);
  EXPECT_EQ(found.completions[1].text, whole.completions[1].text);
}

TEST_F(Outputs, WrongParametersAreAnsweredAtOnce) {
  const auto refused = processor_.add_request("a", prompt_, {.top_p = 2});
  ASSERT_TRUE(refused && refused->error);
  EXPECT_TRUE(support::is_error(*refused->error, ErrorKind::kUsage, {"top_p"}));
  EXPECT_FALSE(processor_.has_unfinished());
}

TEST_F(Outputs, APromptThatIsTooLongIsAnsweredByAStep) {
  EXPECT_FALSE(processor_.add_request("a", support::random_prompt(500, kVocabulary, 1), sampled_));
  const auto found = run().at("a");
  ASSERT_TRUE(found.error);
  EXPECT_TRUE(support::is_error(*found.error, ErrorKind::kUsage, {"the prompt has 500 tokens"}));
  EXPECT_TRUE(found.completions.empty());
}

TEST_F(Outputs, AnIdIsUsedOnceAtATime) {
  processor_.add_request("a", prompt_, sampled_);
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"request a is under way already"},
                             [&] { processor_.add_request("a", prompt_, sampled_); }));
}

TEST_F(Outputs, WithoutATokenizerThereIsNoText) {
  OutputProcessor plain(engine_, nullptr);
  plain.add_request("a", prompt_, {.temperature = 0, .max_tokens = 2});
  std::vector<Answer> answers;
  while (plain.has_unfinished()) {
    for (auto& one : plain.step()) answers.push_back(std::move(one));
  }
  ASSERT_EQ(answers.size(), 1);
  EXPECT_EQ(answers[0].completions[0].tokens.size(), 2);
  EXPECT_EQ(answers[0].completions[0].text, "");
}

TEST_F(Outputs, WithoutATokenizerStopStringsAreRefused) {
  OutputProcessor plain(engine_, nullptr);
  const auto refused = plain.add_request("a", prompt_, {.stop = {"x"}});
  ASSERT_TRUE(refused && refused->error);
  EXPECT_TRUE(support::is_error(*refused->error, ErrorKind::kUsage, {"strings need a tokenizer"}));
}

TEST_F(Outputs, AbortGivesWhatThereIsInTheOrderOfRequests) {
  for (const char* id : {"b", "a"}) processor_.add_request(id, prompt_, sampled_);
  for (int i = 0; i < 5; ++i) processor_.step();
  const auto answers = processor_.abort_all();
  ASSERT_EQ(answers.size(), 2);
  EXPECT_EQ(answers[0].request_id, "b");
  EXPECT_EQ(answers[0].completions[0].tokens.size(), 5);
  EXPECT_EQ(answers[0].completions[0].finish_reason, FinishReason::kAbort);
  EXPECT_FALSE(processor_.has_unfinished());
}

}  // namespace output_processor_test
}  // namespace ferry::rollout
