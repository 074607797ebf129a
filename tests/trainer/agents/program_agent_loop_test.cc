// A session of a program that asks over OpenAI's API, without the program and without the model.
#include "trainer/agents/program_agent_loop.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/support/expect.h"
#include "tests/trainer/dataset/byte_folder.h"
#include "trainer/dataset/prompt_examples.h"

namespace ferry::trainer {
namespace program_agent_loop_test {

using nlohmann::json;
using Scores = std::vector<std::pair<std::size_t, double>>;

json said_by(const char* role, const char* text) {
  return {{"role", role}, {"content", text}};
}

json asked(const char* path, const json& body) {
  return {{"path", path}, {"request", body.dump()}};
}

// A chat of these messages, with more members.
json chat(const std::vector<json>& messages, json more = json::object()) {
  more["messages"] = messages;
  return asked("/chat/completions", more);
}

json completion(const std::vector<std::int64_t>& prompt, json more = json::object()) {
  more["prompt"] = prompt;
  return asked("/completions", more);
}

// The JSON of the events of a stream.
std::vector<json> events_of(const std::string& stream) {
  std::vector<json> events;
  for (std::size_t at = 0; at < stream.size();) {
    const auto end = stream.find("\n\n", at);
    EXPECT_EQ(stream.substr(at, 6), "data: ");
    const auto text = stream.substr(at + 6, end - at - 6);
    if (text != "[DONE]") events.push_back(json::parse(text));
    at = end + 2;
  }
  return events;
}

class ProgramAgentLoopTest : public testing::Test {
 protected:
  ProgramAgentLoopTest() {
    session_.seed = 7;
    session_.task = {{"ground_truth", "12"}};
    session_.messages.push_back({{"role", "user"}, {"content", "Guess."}});
    question_ = loop_.begin(session_).at(0).body;
  }

  // The session goes on as the program says, as AgentRunner has it.
  AgentReply take(const json& answer) {
    session_.exchanges.push_back({{"question", question_}, {"answer", answer}});
    const std::vector answers{answer};
    auto reply = session_.assistant_turns == 0 ? loop_.begun(session_, answers)
                                               : loop_.answered(session_, answers);
    if (reply.questions.empty() && answer.contains("request"))
      session_.turn_begin = session_.response.size();
    if (!reply.questions.empty()) question_ = reply.questions.at(0).body;
    return reply;
  }

  // The model writes a turn, behind `others` tokens that it was told.
  AgentQuestion write(const std::string& text, bool stopped = true, std::size_t others = 0) {
    for (std::size_t i = 0; i < others; ++i) add('x', 0);
    session_.turn_begin = session_.response.size();
    for (const char letter : text) add(static_cast<unsigned char>(letter), 1);
    if (stopped) add(support::kEndOfText, 1);
    session_.turn_stopped = stopped;
    ++session_.assistant_turns;
    auto questions = loop_.turn_is_over(session_, text);
    question_ = questions.at(0).body;
    return questions.at(0);
  }
  void add(std::int64_t token, std::uint8_t mask) {
    session_.response.push_back({.token_id = token});
    session_.response_mask.push_back(mask);
  }

  // The response of the API to the first request, whose answer the model has written.
  json response(const json& request, const std::string& text, bool stopped = true) {
    EXPECT_TRUE(take(request).questions.empty());
    return json::parse(write(text, stopped).details.at("body").get<std::string>());
  }

  // True if the program is told that its request is refused with 400, and why.
  testing::AssertionResult refuses(const json& request, std::string_view why) {
    const auto reply = take(request);
    if (reply.questions.size() != 1 || reply.num_messages + reply.tokens.size() > 0)
      return testing::AssertionFailure() << request << " is taken";
    const auto& [program, body, details, known] = reply.questions[0];
    const auto error = json::parse(details.at("body").get<std::string>()).at("error");
    if (details.at("status") != 400 || body.at("method") != "refuse" || body.at("session") != 7 ||
        body.at("message") != error.at("message") ||
        error.at("message").get<std::string>().find(why) == std::string::npos)
      return testing::AssertionFailure() << body << details;
    return testing::AssertionSuccess();
  }

  // The session ends in an error.
  testing::AssertionResult fails(const json& answer, std::string_view why) {
    return support::fails(ErrorKind::kCorrupt, {"the program of a session", why},
                          [&] { take(answer); });
  }

  // The session has a turn, "ok", to a chat of one message.
  void chat_once() {
    take(chat({said_by("user", "Guess.")}));
    write("ok");
  }

  support::ByteFolder folder_;
  PromptEncoder encoder_{folder_.path(), {}};
  ProgramAgentLoop loop_{AgentSections{.agent = {.program_command = "play", .program_timeout = 5},
                                       .multi_turn = {.reasoning_parser = "deepseek_v3"}},
                         encoder_};
  Session session_;
  json question_;
};

TEST_F(ProgramAgentLoopTest, IsOneProgramThatIsGivenSessions) {
  EXPECT_EQ(loop_.programs(),
            (std::vector<AgentProgramOptions>{{.command = "play",
                                               .timeout = std::chrono::seconds(5),
                                               .protocol = AgentProtocol::kSession,
                                               .keeps_sessions = true}}));
}

TEST_F(ProgramAgentLoopTest, BeginsWithTheTaskAndThePromptOfTheRecord) {
  const auto question = loop_.begin(session_).at(0);
  EXPECT_EQ(question.body, json({{"method", "run"},
                                 {"session", 7},
                                 {"ground_truth", "12"},
                                 {"prompt", {said_by("user", "Guess.")}}}));
  EXPECT_EQ(question.details, json({{"model", "policy"}}));
}

TEST_F(ProgramAgentLoopTest, TheFirstChatIsThePrompt) {
  const auto reply = take(chat({said_by("system", "Be brief."), said_by("user", "How many?")}));
  EXPECT_EQ(reply.num_messages, 2U);
  EXPECT_EQ(json(session_.messages),
            json({said_by("system", "Be brief."), said_by("user", "How many?")}));
}

TEST_F(ProgramAgentLoopTest, TokensAreThePromptAsTheyAre) {
  EXPECT_EQ(take(completion({3, 1, 2})).tokens, (std::vector<std::int64_t>{3, 1, 2}));
}

TEST_F(ProgramAgentLoopTest, TokensOfAChatAreThePromptAsTheyAre) {
  const auto reply = take(chat({said_by("user", "?")}, {{"prompt_token_ids", {5, 6}}}));
  EXPECT_EQ(reply.tokens, (std::vector<std::int64_t>{5, 6}));
  EXPECT_EQ(reply.num_messages, 0U);
}

TEST_F(ProgramAgentLoopTest, ATurnIsTheAnswerOfAChat) {
  session_.prompt = {1, 2, 3};
  const auto answer = response(chat({said_by("user", "Guess.")}), "ok");
  EXPECT_EQ(answer.at("object"), "chat.completion");
  EXPECT_EQ(answer.at("choices").at(0).at("message").at("content"), "ok");
  EXPECT_EQ(answer.at("choices").at(0).at("finish_reason"), "stop");
  EXPECT_EQ(answer.at("usage").at("prompt_tokens"), 3);
  EXPECT_EQ(answer.at("usage").at("completion_tokens"), 3);
  EXPECT_EQ(json(session_.messages.back()), said_by("assistant", "ok"));
}

TEST_F(ProgramAgentLoopTest, ATurnIsTheAnswerOfACompletion) {
  const auto answer = response(completion({1, 2}), "ok");
  EXPECT_EQ(answer.at("object"), "text_completion");
  EXPECT_EQ(answer.at("choices").at(0).at("text"), "ok");
}

TEST_F(ProgramAgentLoopTest, TheJournalHasTheTextOfATurnAndWhyItEnded) {
  take(chat({said_by("user", "Guess.")}));
  EXPECT_EQ(
      write("ok", /*stopped=*/false).body,
      json({{"method", "answer"}, {"session", 7}, {"content", "ok"}, {"finish_reason", "length"}}));
}

TEST_F(ProgramAgentLoopTest, AStreamHasTheWholeTurn) {
  take(chat({said_by("user", "Guess.")},
            {{"stream", true}, {"stream_options", {{"include_usage", true}}}}));
  const auto details = write("ok").details;
  EXPECT_EQ(details.at("type"), "text/event-stream");
  const auto stream = details.at("body").get<std::string>();
  EXPECT_TRUE(stream.ends_with("data: [DONE]\n\n"));
  std::string text;
  for (const auto& event : events_of(stream))
    for (const auto& choice : event.at("choices"))
      text += choice.at("delta").value("content", std::string());
  EXPECT_EQ(text, "ok");
  EXPECT_EQ(events_of(stream).back().at("usage").at("completion_tokens"), 3);
}

TEST_F(ProgramAgentLoopTest, ThoughtsAreNoContentAndHaveNoCalls) {
  const json tool{{"type", "function"}, {"function", {{"name", "add"}}}};
  const std::string call = "<tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>";
  const auto user = said_by("user", "1+2");
  const auto answer =
      response(chat({user}, {{"tools", {tool}}}), "<think>" + call + "?</think>3" + call);
  const auto& message = answer.at("choices").at(0).at("message");
  EXPECT_EQ(message.at("reasoning"), call + "?");
  EXPECT_EQ(message.at("content"), "3");
  EXPECT_EQ(message.at("tool_calls").size(), 1U);
  // A client may give thoughts back or leave them out.
  auto said = message;
  for (const char* name : {"reasoning", "reasoning_content"}) {
    EXPECT_TRUE(
        take(chat({user, said, said_by("tool", "1")}, {{"tools", {tool}}})).questions.empty());
    session_.messages.erase(session_.messages.size() - 1);
    said.erase(name);
  }
  EXPECT_TRUE(
      take(chat({user, said, said_by("tool", "1")}, {{"tools", {tool}}})).questions.empty());
}

TEST_F(ProgramAgentLoopTest, ThePromptOfATurnMayBeginItsThoughts) {
  const auto ids = encoder_.tokenizer().encode("a<think>\n", {.add_special_tokens = false});
  session_.prompt = {ids.begin(), ids.end()};
  const auto message =
      response(chat({said_by("user", "?")}), "so</think>3").at("choices").at(0).at("message");
  EXPECT_EQ(message.at("reasoning"), "so");
  EXPECT_EQ(message.at("content"), "3");
}

TEST_F(ProgramAgentLoopTest, ACompletionKeepsItsThoughts) {
  const auto answer = response(completion({1, 2}), "<think>so");
  EXPECT_EQ(answer.at("choices").at(0).at("text"), "<think>so");
}

TEST_F(ProgramAgentLoopTest, CallsOfToolsAreFoundInATurn) {
  const json tool{{"type", "function"}, {"function", {{"name", "add"}}}};
  const auto answer =
      response(chat({said_by("user", "1+2")}, {{"tools", {tool}}}),
               "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>");
  const auto& choice = answer.at("choices").at(0);
  EXPECT_EQ(choice.at("finish_reason"), "tool_calls");
  EXPECT_EQ(choice.at("message").at("tool_calls").at(0).at("function").at("name"), "add");
  EXPECT_EQ(question_.at("tool_calls"), choice.at("message").at("tool_calls"));
}

TEST_F(ProgramAgentLoopTest, TheTemplateShowsTheToolsOfTheRequest) {
  const json tool{{"type", "function"}, {"function", {{"name", "add"}}}};
  take(chat({said_by("user", "1+2")}, {{"tools", {tool}}}));
  EXPECT_EQ(json(loop_.tools(session_)), json::array({tool}));
}

TEST_F(ProgramAgentLoopTest, ARequestLimitsItsTurn) {
  take(chat({said_by("user", "Guess.")}, {{"max_completion_tokens", 5}}));
  EXPECT_EQ(loop_.max_tokens(session_), 5);
}

TEST_F(ProgramAgentLoopTest, ASessionOfAnotherRankHasItsRequestInTheExchanges) {
  take(chat({said_by("user", "Guess.")}, {{"max_tokens", 6}, {"skip_special_tokens", false}}));
  session_.request.reset();
  EXPECT_EQ(loop_.max_tokens(session_), 6);
  EXPECT_FALSE(loop_.skips_special(session_));
}

TEST_F(ProgramAgentLoopTest, GoesOnBehindTheModelsAnswer) {
  chat_once();
  const auto reply = take(
      chat({said_by("user", "Guess."), said_by("assistant", "ok"), said_by("user", "Lower.")}));
  EXPECT_EQ(reply.num_messages, 1U);
  EXPECT_EQ(session_.messages.size(), 3U);
}

TEST_F(ProgramAgentLoopTest, PassesOverWhatClientsAddToAnAnswer) {
  chat_once();
  auto answer = said_by("assistant", "ok");
  answer.update({{"refusal", nullptr}, {"annotations", json::array()}, {"name", "policy"}});
  EXPECT_EQ(take(chat({said_by("user", "Guess."), answer, said_by("user", "Lower.")})).num_messages,
            1U);
}

TEST_F(ProgramAgentLoopTest, GoesOnBehindItsTokens) {
  take(completion({1, 2}));
  session_.prompt = {1, 2};
  write("ok");
  EXPECT_EQ(take(completion({1, 2, 'o', 'k', support::kEndOfText, 9})).tokens,
            std::vector<std::int64_t>{9});
}

TEST_F(ProgramAgentLoopTest, RefusesAnotherHistory) {
  chat_once();
  EXPECT_TRUE(
      refuses(chat({said_by("user", "Guess."), said_by("assistant", "no"), said_by("user", "?")}),
              "messages.1: is not that of the session, which goes on behind its 2 messages"));
}

TEST_F(ProgramAgentLoopTest, RefusesNothingNew) {
  chat_once();
  EXPECT_TRUE(refuses(chat({said_by("user", "Guess."), said_by("assistant", "ok")}),
                      "have nothing behind the model's answer"));
}

TEST_F(ProgramAgentLoopTest, RefusesAnAnswerThatTheModelHasNotGiven) {
  chat_once();
  EXPECT_TRUE(refuses(chat({said_by("user", "Guess."), said_by("assistant", "ok"),
                            said_by("user", "?"), said_by("assistant", "mine")}),
                      "messages.3: is an answer that is not the model's"));
}

TEST_F(ProgramAgentLoopTest, RefusesOtherTools) {
  chat_once();
  EXPECT_TRUE(
      refuses(chat({said_by("user", "Guess."), said_by("assistant", "ok"), said_by("user", "?")},
                   {{"tools", {{{"type", "function"}, {"function", {{"name", "add"}}}}}}}),
              "tools: are others than those that the session began with"));
}

TEST_F(ProgramAgentLoopTest, RefusesAMessageBehindATurnThatALimitHasCutOff) {
  take(chat({said_by("user", "Guess.")}));
  write("ok", /*stopped=*/false);
  EXPECT_TRUE(
      refuses(chat({said_by("user", "Guess."), said_by("assistant", "ok"), said_by("user", "?")}),
              "no message can follow an answer that a limit has cut off"));
}

TEST_F(ProgramAgentLoopTest, RefusesTokensOfAnotherSession) {
  take(completion({1, 2}));
  session_.prompt = {1, 2};
  write("ok");
  EXPECT_TRUE(refuses(completion({1, 9, 9}), "from its token 1 on"));
}

TEST_F(ProgramAgentLoopTest, RefusesATokenThatTheTokenizerLacks) {
  EXPECT_TRUE(refuses(completion({1, 259}), "259 is no token of the tokenizer"));
}

TEST_F(ProgramAgentLoopTest, RefusesMessagesBehindTokens) {
  take(completion({1, 2}));
  session_.prompt = {1, 2};
  write("ok");
  EXPECT_TRUE(refuses(chat({said_by("user", "?")}), "can go on by them"));
}

TEST_F(ProgramAgentLoopTest, RefusesABodyThatIsNoObject) {
  EXPECT_TRUE(refuses({{"path", "/completions"}, {"request", "[1"}}, "JSON"));
}

class UnfitField : public ProgramAgentLoopTest,
                   public testing::WithParamInterface<std::pair<const char*, json>> {};

TEST_P(UnfitField, IsRefusedByItsName) {
  const auto& [name, value] = GetParam();
  EXPECT_TRUE(refuses(chat({said_by("user", "Guess.")}, {{name, value}}), name));
}

INSTANTIATE_TEST_SUITE_P(Fields,
                         UnfitField,
                         testing::Values(std::pair("n", json(2)),
                                         std::pair("stop", json("x")),
                                         std::pair("stop_token_ids", json({1})),
                                         std::pair("min_tokens", json(3)),
                                         std::pair("ignore_eos", json(true)),
                                         std::pair("logit_bias", json({{"5", 1.0}})),
                                         std::pair("allowed_token_ids", json({1})),
                                         std::pair("prompt_logprobs", json(1)),
                                         std::pair("truncate_prompt_tokens", json(4)),
                                         std::pair("documents", json::array({1})),
                                         std::pair("continue_final_message", json(true))),
                         [](const auto& one) { return std::string(one.param.first); });

// The model has no room for it: the session stands where it stood.
TEST_F(ProgramAgentLoopTest, TakesMessagesBackThatTheModelCannotBeGiven) {
  chat_once();
  const auto more =
      chat({said_by("user", "Guess."), said_by("assistant", "ok"), said_by("user", "Much.")});
  const auto questions = loop_.is_refused(session_, take(more), "there is no room");
  EXPECT_EQ(questions.at(0).body.at("message"), "there is no room");
  EXPECT_EQ(session_.messages.size(), 2U);
  EXPECT_EQ(take(more).num_messages, 1U);
}

TEST_F(ProgramAgentLoopTest, TakesTokensBackThatTheModelCannotBeGiven) {
  const json tools{{{"type", "function"}, {"function", {{"name", "add"}}}}};
  take(chat({said_by("user", "Guess.")}, {{"tools", tools}}));
  write("ok");
  const auto reply = take(completion({'o', 'k', support::kEndOfText, 9}));
  EXPECT_EQ(reply.tokens.size(), 1U);
  question_ = loop_.is_refused(session_, reply, "there is no room").at(0).body;
  const auto again =
      take(chat({said_by("user", "Guess."), said_by("assistant", "ok"), said_by("user", "?")},
                {{"tools", tools}}));
  EXPECT_EQ(again.num_messages, 1U) << question_;
}

TEST_F(ProgramAgentLoopTest, TheRewardIsOfTheLastToken) {
  chat_once();
  const auto reply = take({{"reward", 0.5}, {"info", {{"moves", 3}}}});
  EXPECT_TRUE(reply.questions.empty());
  EXPECT_EQ(reply.num_messages + reply.tokens.size(), 0U);
  EXPECT_EQ(session_.turn_scores, (Scores{{2, 0.5}}));
  EXPECT_EQ(session_.extra_info, json({{"moves", 3}}));
}

TEST_F(ProgramAgentLoopTest, RewardsOfTurnsAreOfTheirLastTokens) {
  chat_once();
  write("so", true, /*others=*/2);
  take({{"turn_rewards", {0.25, -1}}});
  EXPECT_EQ(session_.turn_scores, (Scores{{2, 0.25}, {7, -1}}));
}

TEST_F(ProgramAgentLoopTest, NoRewardIsNone) {
  chat_once();
  take(json::object());
  EXPECT_TRUE(session_.turn_scores.empty());
}

TEST_F(ProgramAgentLoopTest, AProgramThatFailsEndsTheRun) {
  chat_once();
  EXPECT_TRUE(fails({{"error", "no answer within 5 s"}}, "it reports an error"));
}

TEST_F(ProgramAgentLoopTest, AProgramThatAsksNothingEndsTheRun) {
  EXPECT_TRUE(fails({{"reward", 1}}, "it ends, and has asked the model nothing"));
}

TEST_F(ProgramAgentLoopTest, ARewardThatIsNoNumberEndsTheRun) {
  chat_once();
  EXPECT_TRUE(fails({{"reward", "much"}}, "a reward is a number"));
}

TEST_F(ProgramAgentLoopTest, RewardsOfOtherTurnsEndTheRun) {
  chat_once();
  EXPECT_TRUE(fails({{"turn_rewards", {1, 2}}}, "turn_rewards are 1 numbers"));
}

}  // namespace program_agent_loop_test
}  // namespace ferry::trainer
