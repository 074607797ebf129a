#include "trainer/agents/agent_runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/messages.h"
#include "trainer/agents/env_agent_loop.h"
#include "trainer/agents/http_environment.h"
#include "trainer/agents/mcp_server.h"
#include "trainer/agents/program_agent_loop.h"
#include "trainer/agents/session_program.h"
#include "trainer/agents/tool_agent_loop.h"
#include "trainer/metrics/metric_log.h"

namespace ferry::trainer {

using nlohmann::json;

namespace {

std::unique_ptr<AgentProgram> make_program(const AgentProgramOptions& options) {
  if (options.protocol == AgentProtocol::kMcp) return std::make_unique<McpServer>(options);
  if (options.protocol == AgentProtocol::kHttp) return std::make_unique<HttpEnvironment>(options);
  if (options.protocol == AgentProtocol::kSession) return std::make_unique<SessionProgram>(options);
  return std::make_unique<AgentProgram>(options);
}

std::string shown_question(const json& question) {
  return question.dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string span_name(AgentLoopKind loop, const json& question) {
  const auto tool = question.find("name");
  if (tool != question.end()) return "tool/" + tool->get<std::string>();
  return (loop == AgentLoopKind::kProgram ? "program/" : "env/") +
         question.at("method").get<std::string>();
}

// The answer that the journal has to a question of a session.
json replayed(const Session& session, std::size_t number, const json& question) {
  const auto& known = session.replay.at("exchanges");
  const auto expected =
      number < known.size() ? shown_question(known[number].at("question")) : "nothing";
  require(expected == shown_question(question), ErrorKind::kUsage,
          "replay: session {} asks {}, where the journal has {}", session.seed,
          shown_question(question), expected);
  return known[number].at("answer");
}

std::int64_t turn_tokens(const Session& session) {
  return static_cast<std::int64_t>(session.response.size() - session.turn_begin);
}

// The number of tokens that a session that is played again has when it waits for the next weights;
// the most if it does not wait.
std::int64_t stop_of(const Session& session, std::int64_t global_step) {
  std::int64_t tokens = 0;
  if (session.replay.contains("global_steps"))
    for (const auto& run : session.replay["global_steps"]) {
      if (run.at(0) > global_step) return tokens;
      tokens += run.at(1).get<std::int64_t>();
    }
  return std::numeric_limits<std::int64_t>::max();
}

}  // namespace

AgentRunner::AgentRunner(const AgentSections& config,
                         const Tools& tools,
                         const AgentLimits& limits,
                         rollout::LLMEngine& engine,
                         const PromptEncoder& encoder,
                         const models::ProcessGroup& tp)
    : config_(config), limits_(limits), engine_(engine), encoder_(encoder), tp_(tp) {
  add_loop(AgentLoopKind::kSingleTurn, nullptr);
  if (config.has(AgentLoopKind::kTool))
    add_loop(AgentLoopKind::kTool, std::make_unique<ToolAgentLoop>(tools, config, encoder));
  if (config.has(AgentLoopKind::kEnv))
    add_loop(AgentLoopKind::kEnv, std::make_unique<EnvAgentLoop>(config.agent));
  if (config.has(AgentLoopKind::kProgram))
    add_loop(AgentLoopKind::kProgram, std::make_unique<ProgramAgentLoop>(config, encoder));
}

AgentRunner::~AgentRunner() = default;

void AgentRunner::add_loop(AgentLoopKind kind, std::unique_ptr<AgentLoop> loop) {
  const auto first_program = programs_.size();
  if (loop && tp_.rank() == 0)
    for (const auto& program : loop->programs()) programs_.push_back(make_program(program));
  loops_[kind] = {.loop = std::move(loop), .first_program = first_program};
}

const AgentLoop* AgentRunner::loop_of(const Session& session) const {
  return loops_.at(session.loop).loop.get();
}

void AgentRunner::run(std::vector<Session>& sessions,
                      const rollout::SamplingParams& params,
                      std::int64_t global_step,
                      const SessionObserver& observer,
                      const std::function<bool()>& is_enough) {
  sessions_ = &sessions;
  observer_ = observer;
  params_ = params;
  global_step_ = global_step;
  bool more = static_cast<bool>(observer_.next);
  bool has_enough = is_enough();
  for (std::size_t number = 0; !more && !has_enough && number < sessions.size(); ++number)
    start(number);
  bool generates = false;
  while (true) {
    if (more && !has_enough) {
      const auto numbers = observer_.next(/*waits=*/!generates && asked_.empty());
      more = numbers.has_value();
      if (more) std::ranges::for_each(*numbers, [&](auto number) { start(number); });
    }
    generates = engine_.has_unfinished();
    const bool goes_on = !has_enough && (more || !asked_.empty());
    if (!generates && !engine_.any_rank(goes_on)) break;
    if (generates) step();
    observer_.poll();
    if (has_enough) continue;  // steps with ranks that have not
    if (!asked_.empty()) {
      take_answers(/*wait=*/!generates);
      for (const auto number : std::exchange(ready_, {}))
        if (resume(number)) {
          generate(number);
          generates = true;  // so that next() does not wait
        }
    }
    has_enough = is_enough();
    if (has_enough) abort();
  }
  interrupt();
  observer_ = {};
  for (auto& program : programs_) (void)program->answers(std::chrono::milliseconds(0));  // notices
}

void AgentRunner::step() {
  for (const auto& output : engine_.step()) {
    if (output.error) throw Error(*output.error);
    take(std::stoul(output.request_id), output);
  }
}

// Ends what the engine has of the sessions.
void AgentRunner::abort() {
  for (std::size_t number = 0; number < sessions_->size(); ++number)
    (void)engine_.abort(std::to_string(number));
}

void AgentRunner::start(std::size_t number) {
  const auto& session = (*sessions_)[number];
  if (session.is_over || stop_of(session, global_step_) == 0) return;
  if (session.has_begun)
    generate(number);
  else
    begin(number);
}

void AgentRunner::begin(std::size_t number) {
  auto& session = (*sessions_)[number];
  session.has_begun = true;
  const auto* loop = loop_of(session);
  auto questions = loop == nullptr ? std::vector<AgentQuestion>() : loop->begin(session);
  if (questions.empty())
    generate(number);
  else
    ask(number, std::move(questions));
}

void AgentRunner::take_answers(bool wait) {
  for (auto& [id, answer] : receive(wait)) {
    const auto place = places_.at(id);
    places_.erase(id);
    auto& asked = asked_.at(place.session);
    spans_.push_back(
        {.name = span_name((*sessions_)[place.session].loop, asked.questions[place.question].body),
         .start = place.asked,
         .end = steady_time()});
    asked.answers[place.question] = std::move(answer);
    if (++asked.num_answers == asked.questions.size()) ready_.insert(place.session);
  }
}

// Sessions that are not over stand behind a token, and wait for the model.
void AgentRunner::interrupt() {
  while (!asked_.empty()) {
    for (const auto number : std::exchange(ready_, {})) (void)resume(number);
    observer_.poll();
    if (!asked_.empty()) take_answers(/*wait=*/true);
  }
}

void AgentRunner::generate(std::size_t number) {
  auto& session = (*sessions_)[number];
  const auto most = std::min(limits_.max_response_length, stop_of(session, global_step_));
  if (std::cmp_greater_equal(session.response.size(), most)) return;
  auto tokens = session.prompt;
  for (const auto& token : session.response) tokens.push_back(token.token_id);
  auto mine = params_;
  mine.seed = session.seed;
  mine.max_tokens = most - static_cast<std::int64_t>(session.response.size());
  if (const auto* loop = loop_of(session))
    mine.max_tokens = std::min(mine.max_tokens, loop->max_tokens(session) - turn_tokens(session));
  session.routed_experts.clear();  // the request returns those of its prompt, too
  engine_.add_request(std::to_string(number), std::move(tokens), mine,
                      encoder_.visual_prompt(session.images, session.prompt));
}

void AgentRunner::take(std::size_t number, const rollout::RequestOutput& output) {
  auto& session = (*sessions_)[number];
  for (const auto& sample : output.outputs) {
    std::ranges::copy(sample.tokens, std::back_inserter(session.response));
    session.response_mask.resize(session.response.size(), 1);
    session.global_steps.resize(session.response.size(), global_step_);
    std::ranges::copy(sample.routed_experts, std::back_inserter(session.routed_experts));
    const bool stopped = sample.finish_reason == rollout::FinishReason::kStop;
    const bool waits =
        !stopped && std::cmp_equal(session.response.size(), stop_of(session, global_step_));
    if (output.finished && !waits) turn_is_over(number, stopped);
  }
}

// True if another turn may follow that of the model (verl's tool_agent_loop.py).
bool AgentRunner::may_go_on(const Session& session) const {
  const auto& turns = config_.multi_turn;
  const auto reached = [](int count, const std::optional<int>& most) {
    return most && count >= *most;
  };
  return static_cast<std::int64_t>(session.response.size()) < limits_.max_response_length &&
         !reached(session.assistant_turns, turns.max_assistant_turns) &&
         !reached(session.user_turns, turns.max_user_turns);
}

void AgentRunner::turn_is_over(std::size_t number, bool stopped) {
  auto& session = (*sessions_)[number];
  ++session.assistant_turns;
  session.is_over = true;
  const auto* loop = loop_of(session);
  if (loop == nullptr) return observer_.is_over(number);
  if (!loop->asks_about(stopped, may_go_on(session))) return cut_off(number);
  std::vector<std::int64_t> said;
  for (auto at = session.turn_begin; at < session.response.size(); ++at)
    said.push_back(session.response[at].token_id);
  if (stopped) said.pop_back();
  session.turn_stopped = stopped;
  auto questions = loop->turn_is_over(session, encoder_.decode(said, loop->skips_special(session)));
  if (questions.empty()) return observer_.is_over(number);
  session.is_over = false;
  ask(number, std::move(questions));
}

void AgentRunner::ask(std::size_t number, std::vector<AgentQuestion> questions) {
  const auto& session = (*sessions_)[number];
  const auto first_program = loops_.at(session.loop).first_program;
  auto& asked = asked_[number];
  asked.answers.resize(questions.size());
  for (std::size_t i = 0; i < questions.size(); ++i) {
    if (!session.replay.is_null())
      questions[i].known = replayed(session, session.exchanges.size() + i, questions[i].body);
    if (questions[i].known) {
      asked.answers[i] = *questions[i].known;
      ++asked.num_answers;
      continue;
    }
    places_[next_id_] = {.session = number, .question = i, .asked = steady_time()};
    if (!programs_.empty()) {
      auto told = questions[i].body;
      if (!questions[i].details.is_null()) told.update(questions[i].details);
      programs_[first_program + questions[i].program]->ask(next_id_, std::move(told));
    }
    ++next_id_;
  }
  asked.questions = std::move(questions);
  if (asked.num_answers == asked.questions.size()) ready_.insert(number);
}

// Ranks of a group take the same answers in the same order.
std::vector<AgentAnswer> AgentRunner::receive(bool wait) {
  constexpr std::chrono::milliseconds kWait(20);
  std::vector<AgentAnswer> answers;
  const auto count = static_cast<int>(std::max<std::size_t>(programs_.size(), 1));
  for (auto& program : programs_)
    std::ranges::move(program->answers(wait ? kWait / count : std::chrono::milliseconds(0)),
                      std::back_inserter(answers));
  if (tp_.size() == 1) return answers;
  std::vector<std::pair<std::int64_t, json>> pairs;
  for (auto& [id, answer] : answers) pairs.emplace_back(id, std::move(answer));
  answers.clear();
  for (auto& [id, answer] : models::broadcast(tp_, pairs, 0))
    answers.push_back({id, std::move(answer)});
  return answers;
}

bool AgentRunner::resume(std::size_t number) {
  auto& session = (*sessions_)[number];
  const auto asked = std::move(asked_.extract(number).mapped());
  for (std::size_t i = 0; i < asked.questions.size(); ++i)
    session.exchanges.push_back(
        {{"question", asked.questions[i].body}, {"answer", asked.answers[i]}});
  const auto* loop = loop_of(session);
  const bool begins = session.assistant_turns == 0;
  auto reply =
      begins ? loop->begun(session, asked.answers) : loop->answered(session, asked.answers);
  if (!reply.questions.empty()) {
    ask(number, std::move(reply.questions));
    return false;
  }
  if (begins) return prompt_is_known(number, reply);
  session.is_over = true;
  if (reply.is_cut_off) {
    cut_off(number);
    return false;
  }
  if (reply.num_messages == 0 && reply.tokens.empty()) {
    observer_.is_over(number);
    return false;
  }
  std::vector<std::int64_t> turn;
  try {
    if (may_go_on(session)) turn = encoded(session, reply);
  } catch (const Error& error) {
    if (refuses(number, reply, error.what())) return false;
    throw;
  }
  const auto size = static_cast<std::int64_t>(session.response.size() + turn.size());
  if (turn.empty() || size >= limits_.max_response_length) {
    const auto why = fmt::format(
        "the session has no room for this and another turn: it has {} of {} tokens "
        "(data.max_response_length) and {} turns of the model (multi_turn."
        "max_assistant_turns, max_user_turns)",
        session.response.size(), limits_.max_response_length, session.assistant_turns);
    if (!refuses(number, reply, why)) cut_off(number);
    return false;
  }
  append(session, turn);
  ++session.user_turns;
  session.turn_begin = session.response.size();
  session.is_over = false;
  return true;
}

// The tokens of what a reply has for the model.
std::vector<std::int64_t> AgentRunner::encoded(const Session& session,
                                               const AgentReply& reply) const {
  if (reply.num_messages == 0) return reply.tokens;
  const auto tools = loop_of(session)->tools(session);
  if (session.assistant_turns == 0)
    return encoder_.encode_messages(session.messages, tools, session.images);
  return encoder_.encode_turn(session.messages, reply.num_messages, tools);
}

// True if the loop asks on where a reply cannot be given to the model.
bool AgentRunner::refuses(std::size_t number, const AgentReply& reply, const std::string& why) {
  auto& session = (*sessions_)[number];
  auto questions = loop_of(session)->is_refused(session, reply, why);
  if (questions.empty()) return false;
  session.is_over = false;
  ask(number, std::move(questions));
  return true;
}

// True if the model goes on.
bool AgentRunner::prompt_is_known(std::size_t number, const AgentReply& reply) {
  auto& session = (*sessions_)[number];
  if (reply.num_messages == 0 && reply.tokens.empty()) return true;
  std::vector<std::int64_t> prompt;
  try {
    prompt = encoded(session, reply);
  } catch (const Error& error) {
    if (refuses(number, reply, error.what())) return false;
    throw;
  }
  if (std::cmp_greater(prompt.size(), limits_.max_prompt_length)) {
    const auto why = fmt::format("prompt: {} tokens, more than data.max_prompt_length of {}",
                                 prompt.size(), limits_.max_prompt_length);
    require(refuses(number, reply, why), ErrorKind::kUsage, "{}, with what the environment says",
            why);
    return false;
  }
  session.prompt = std::move(prompt);
  return true;
}

// A token that was not drawn is the only one that could be: its probability is 1.
void AgentRunner::append(Session& session, const std::vector<std::int64_t>& tokens) const {
  for (const auto token : tokens) {
    auto& output = session.response.emplace_back(rollout::TokenOutput{.token_id = token});
    if (params_.return_sampling_mask) output.sampling_mask = {static_cast<std::int32_t>(token)};
  }
  session.response_mask.resize(session.response.size(), 0);
  session.global_steps.resize(session.response.size(), global_step_);
}

void AgentRunner::cut_off(std::size_t number) {
  const auto& session = (*sessions_)[number];
  const auto& [loop, first_program] = loops_.at(session.loop);
  const auto notice = loop->cut_off(session);
  if (notice && !programs_.empty()) programs_[first_program]->tell(*notice);
  observer_.is_over(number);
}

}  // namespace ferry::trainer
