#include "trainer/agents/program_agent_loop.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "distckpt/base/error.h"
#include "rollout/text/answer_reader.h"
#include "serve/api/api_error.h"
#include "serve/api/chat_prompt.h"
#include "serve/api/choices.h"
#include "serve/api/fields.h"

namespace ferry::trainer {

using nlohmann::json;
using nlohmann::ordered_json;
using serve::ApiError;

namespace {

constexpr const char* kModelName = "policy";

bool is_chat(const json& asked) {
  return asked.at("path") == "/chat/completions";
}

ordered_json body_of(const json& asked) {
  return serve::parse_object(asked.at("request").get_ref<const std::string&>());
}

// The request that the model answers, or has answered last.
const json& request_of(const Session& session) {
  return session.exchanges.back().at("answer");
}

std::vector<std::int64_t> tokens_of(const Session& session, std::size_t num_response) {
  auto tokens = session.prompt;
  for (std::size_t i = 0; i < num_response; ++i) tokens.push_back(session.response[i].token_id);
  return tokens;
}

ordered_json tools_of(const ordered_json& body) {
  const auto found = body.find("tools");
  return found == body.end() || found->empty() ? ordered_json() : *found;
}

// The request that the first turn answers.
const json& first_request(const Session& session) {
  for (std::size_t i = 1; i < session.exchanges.size(); ++i)
    if (session.exchanges[i].at("question").at("method") == "answer")
      return session.exchanges[i - 1].at("answer");
  return request_of(session);
}

// A message without what clients add or leave out; an answer keeps its text and its calls.
ordered_json essence(const ordered_json& message) {
  ordered_json kept;
  const bool is_answer = message.value("role", "") == "assistant";
  for (const auto& [key, value] : message.items()) {
    const bool says_nothing = value.is_null() || (value.is_string() && value == "");
    if (says_nothing || (value.is_array() && value.empty())) continue;
    if (is_answer && key != "role" && key != "content" && key != "tool_calls") continue;
    kept[key] = value;
  }
  if (is_answer && kept.contains("tool_calls") && kept["tool_calls"].is_array())
    for (auto& call : kept["tool_calls"])
      if (call.is_object()) call.erase("type");
  return kept;
}

// Compares them as JSON objects are equal: in any order of members.
bool is_same(const ordered_json& one, const ordered_json& other) {
  return json(essence(one)) == json(essence(other));
}

// Refuses what would have tokens drawn otherwise than the trainer computes them.
void refuse_fields(const serve::GenerationRequest& request, const ordered_json& body) {
  const serve::Fields fields(body);
  const auto& params = request.params;
  const auto refuse_if = [&](bool is_set, const char* name) {
    if (is_set) fields.refuse(name, "is not supported in a session of program_agent");
  };
  refuse_if(params.n != 1, "n");
  refuse_if(!params.stop.empty(), "stop");
  refuse_if(!params.stop_token_ids.empty(), "stop_token_ids");
  refuse_if(params.min_tokens != 0, "min_tokens");
  refuse_if(params.ignore_eos, "ignore_eos");
  refuse_if(!params.structured_outputs.empty(),
            fields.has("tool_choice") ? "tool_choice" : "response_format");
  refuse_if(params.logprobs.value_or(0) > 0, request.is_chat ? "top_logprobs" : "logprobs");
  refuse_if(!params.logit_bias.empty(), "logit_bias");
  refuse_if(!params.allowed_token_ids.empty(), "allowed_token_ids");
  refuse_if(!params.bad_words_token_ids.empty(), "bad_words");
  refuse_if(!request.echoes.empty(), "echo");
  refuse_if(request.prompt_logprobs.has_value(), "prompt_logprobs");
  for (const auto* const name : {"include_stop_str_in_output", "truncate_prompt_tokens"})
    refuse_if(fields.has(name), name);
  refuse_if(fields.has("chat_template_kwargs"), "chat_template_kwargs");
  refuse_if(fields.has("documents"), "documents");
  refuse_if(fields.has("continue_final_message"), "continue_final_message");
}

AgentQuestion refusal(const Session& session, const ApiError& error) {
  return {.body = {{"method", "refuse"}, {"session", session.seed}, {"message", error.what()}},
          .details = {
              {"status", error.status()}, {"type", "application/json"}, {"body", error.body()}}};
}

std::string event(const std::string& data) {
  return "data: " + data + "\n\n";
}

}  // namespace

ProgramAgentLoop::ProgramAgentLoop(const AgentSections& config, const PromptEncoder& encoder)
    : config_(config.agent),
      encoder_(encoder),
      model_{.name = kModelName,
             .max_model_len = std::numeric_limits<std::int64_t>::max() / 2,
             .vocab_size = std::numeric_limits<std::int64_t>::max(),
             .tokenizer = &encoder.tokenizer(),
             .tool_format = config.multi_turn.format,
             .reasoning = config.reasoning()} {}

std::vector<AgentProgramOptions> ProgramAgentLoop::programs() const {
  return {{.command = config_.program_command,
           .timeout = std::chrono::seconds(config_.program_timeout),
           .protocol = AgentProtocol::kSession,
           .keeps_sessions = true}};
}

// Any name of a model is that of the policy.
ProgramRequest ProgramAgentLoop::read(const json& asked, ordered_json body) const {
  auto tools = tools_of(body);
  body["model"] = kModelName;
  const bool chats = is_chat(asked), has_ids = !chats || body.contains("prompt_token_ids");
  if (!has_ids) body["prompt_token_ids"] = {0};
  return {.generation = chats ? serve::parse_chat_completion(body, model_)
                              : serve::parse_completion(body, model_),
          .tools = std::move(tools),
          .has_ids = has_ids};
}

// A session that comes from another rank has it only in its exchanges.
std::shared_ptr<const ProgramRequest> ProgramAgentLoop::request(const Session& session) const {
  if (session.request) return session.request;
  const auto& asked = request_of(session);
  return std::make_shared<ProgramRequest>(read(asked, body_of(asked)));
}

ordered_json ProgramAgentLoop::tools(const Session& session) const {
  return request(session)->tools;
}

bool ProgramAgentLoop::skips_special(const Session& session) const {
  return request(session)->generation.skip_special_tokens;
}

std::int64_t ProgramAgentLoop::max_tokens(const Session& session) const {
  return request(session)->generation.params.max_tokens;
}

std::vector<AgentQuestion> ProgramAgentLoop::begin(const Session& session) const {
  auto body = session.task;
  body["method"] = "run";
  body["session"] = session.seed;
  body["prompt"] = session.messages;
  return {{.body = std::move(body), .details = {{"model", kModelName}}}};
}

AgentReply ProgramAgentLoop::begun(Session& session, std::span<const json> answers) const {
  return answered(session, answers);
}

std::vector<AgentQuestion> ProgramAgentLoop::turn_is_over(Session& session,
                                                          const std::string& text) const {
  const auto asked = this->request(session);
  if (asked->has_ids) session.messages.clear();  // it goes on by token ids alone
  auto request = asked->generation;
  request.prompts = {session.tokens_before_turn()};
  serve::SamplePart part{
      .text = text,
      .tokens = {session.response.begin() + static_cast<std::ptrdiff_t>(session.turn_begin),
                 session.response.end()},
      .finish_reason =
          session.turn_stopped ? rollout::FinishReason::kStop : rollout::FinishReason::kLength};
  if (request.is_chat && model_.reasoning)
    request.thoughts = encoder_.thoughts_behind(request.prompts.front(), *model_.reasoning);
  if (request.tool_format || request.thoughts) {
    auto found =
        rollout::text::read_answer(text, request.thoughts, request.tool_format, request.tools);
    part.text = std::move(found.content);
    if (request.include_reasoning) part.reasoning = std::move(found.reasoning);
    part.calls = std::move(found.calls);
    if (!request.parallel_tool_calls && part.calls.size() > 1) part.calls.resize(1);
  }
  const serve::Usage usage{
      .prompt_tokens = static_cast<std::int64_t>(request.prompts.front().size()),
      .completion_tokens = static_cast<std::int64_t>(part.tokens.size())};
  serve::TokenTexts texts(model_.tokenizer);
  const auto id = fmt::format("{}-{}-{}", request.is_chat ? "chatcmpl" : "cmpl", session.seed,
                              session.assistant_turns);
  const auto whole =
      serve::AnswerWriter(request, model_, texts, id, /*created=*/0).whole({part}, usage, 0, {});
  const auto choice = ordered_json::parse(whole).at("choices").at(0);
  json body{{"method", "answer"},
            {"session", session.seed},
            {"finish_reason", choice.at("finish_reason")}};
  if (request.is_chat && !session.messages.empty()) {
    auto message = serve::chat_messages({{"messages", {choice.at("message")}}}).at(0);
    message.erase("refusal");
    if (message.at("content").is_null()) message["content"] = "";
    session.messages.push_back(message);
  }
  body["content"] = part.text;
  if (!part.calls.empty()) body["tool_calls"] = choice.at("message").at("tool_calls");
  json details{{"status", 200}, {"type", "application/json"}, {"body", whole}};
  if (request.stream) {
    serve::AnswerWriter writer(request, model_, texts, id, /*created=*/0);
    std::string events;
    if (request.is_chat || request.return_token_ids) events += event(writer.first_chunk(0));
    events += event(writer.chunk(std::move(part), usage));
    if (request.include_usage) events += event(writer.usage_chunk(usage));
    details["type"] = "text/event-stream";
    details["body"] = events + event("[DONE]");
  }
  return {{.body = std::move(body), .details = std::move(details)}};
}

AgentReply ProgramAgentLoop::answered(Session& session, std::span<const json> answers) const {
  const auto& said = answers.front();
  const auto shown = [&] { return said.dump(-1, ' ', false, json::error_handler_t::replace); };
  const auto require_that = [&](bool is_so, std::string_view why) {
    require(is_so, ErrorKind::kCorrupt, "the program of a session: {}: {}", why, shown());
  };
  if (session.times_out(said)) return {.is_cut_off = true};
  require_that(!said.contains("error"), "it reports an error");
  if (said.contains("request")) {
    try {
      return take_request(session, said);
    } catch (const ApiError& error) {
      return {.questions = {refusal(session, error)}};
    }
  }
  require_that(session.assistant_turns > 0, "it ends, and has asked the model nothing");
  const auto reward = said.value("reward", json(0)), rewards = said.value("turn_rewards", json());
  require_that(reward.is_number(), "a reward is a number");
  if (reward != 0) session.earn(session.response.size() - 1, reward.get<double>());
  if (!rewards.is_null()) {
    require_that(rewards.is_array() && std::cmp_equal(rewards.size(), session.assistant_turns) &&
                     std::ranges::all_of(rewards, &json::is_number),
                 fmt::format("turn_rewards are {} numbers, one for each turn of the model",
                             session.assistant_turns));
    std::size_t turn = 0;
    for (std::size_t i = 0; i < session.response.size(); ++i) {
      const bool is_last = session.response_mask[i] == 1 &&
                           (i + 1 == session.response.size() || session.response_mask[i + 1] == 0);
      if (is_last) session.earn(i, rewards.at(turn++).get<double>());
    }
  }
  const auto info = said.find("info");
  if (info != said.end() && info->is_object()) session.extra_info.update(*info);
  return {};
}

// Throws ApiError for a request that does not go on behind the session's tokens.
AgentReply ProgramAgentLoop::take_request(Session& session, const json& asked) const {
  const auto body = body_of(asked);
  const bool begins = session.assistant_turns == 0;
  const auto read_request = std::make_shared<ProgramRequest>(read(asked, body));
  const auto& request = read_request->generation;
  refuse_fields(request, body);
  if (read_request->has_ids) {
    if (request.prompts.size() != 1)
      throw ApiError(400, "prompt: is one, in a session of program_agent", "prompt");
    auto tokens = request.prompts.front();
    const auto known =
        begins ? std::vector<std::int64_t>() : tokens_of(session, session.response.size());
    const auto differs = std::ranges::mismatch(known, tokens);
    if (differs.in1 != known.end())
      throw ApiError(
          400,
          fmt::format("prompt: is not the session so far from its token {} on: a session "
                      "goes on behind its {} tokens",
                      differs.in1 - known.begin(), known.size()),
          "prompt");
    if (differs.in2 == tokens.end())
      throw ApiError(400, "prompt: has nothing behind the session so far", "prompt");
    tokens.erase(tokens.begin(), differs.in2);
    // The model may have drawn ids that its tokenizer lacks, others may not say such.
    for (const auto id : tokens)
      if (std::cmp_greater_equal(id, model_.tokenizer->vocab_size()))
        throw ApiError(400, fmt::format("prompt: {} is no token of the tokenizer", id), "prompt");
    session.request = read_request;
    return {.tokens = std::move(tokens)};
  }
  auto messages = serve::chat_messages(body);
  auto& known = session.messages;
  if (begins) {
    known = messages;
    session.request = read_request;
    return {.num_messages = messages.size()};
  }
  if (known.empty())
    throw ApiError(400, "messages: the session has gone on by token ids, and can go on by them",
                   "messages");
  if (!session.turn_stopped)
    throw ApiError(400, "messages: no message can follow an answer that a limit has cut off",
                   "messages");
  const auto tools =
      session.request ? session.request->tools : tools_of(body_of(first_request(session)));
  if (json(read_request->tools) != json(tools))
    throw ApiError(400, "tools: are others than those that the session began with", "tools");
  for (std::size_t i = 0; i < known.size(); ++i) {
    if (i >= messages.size() || !is_same(messages[i], known[i]))
      throw ApiError(
          400,
          fmt::format("messages.{}: is not that of the session, which goes on behind its "
                      "{} messages",
                      i, known.size()),
          "messages");
  }
  const auto count = messages.size() - known.size();
  for (std::size_t i = known.size(); i < messages.size(); ++i)
    if (messages[i].at("role") == "assistant")
      throw ApiError(400, fmt::format("messages.{}: is an answer that is not the model's", i),
                     "messages");
  if (count == 0)
    throw ApiError(400, "messages: have nothing behind the model's answer", "messages");
  for (std::size_t i = known.size(); i < messages.size(); ++i)
    session.messages.push_back(messages[i]);
  session.request = read_request;
  return {.num_messages = count};
}

std::vector<AgentQuestion> ProgramAgentLoop::is_refused(Session& session,
                                                        const AgentReply& reply,
                                                        const std::string& why) const {
  for (std::size_t i = 0; i < reply.num_messages; ++i)
    session.messages.erase(session.messages.size() - 1);
  session.request.reset();
  return {refusal(session, ApiError(400, why, is_chat(request_of(session)) ? "messages" : "prompt",
                                    "context_length_exceeded"))};
}

}  // namespace ferry::trainer
