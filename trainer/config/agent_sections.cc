#include "trainer/config/agent_sections.h"

namespace ferry::trainer {

namespace {

// The key that gives a run this loop.
std::string_view key_of(AgentLoopKind loop) {
  return loop == AgentLoopKind::kTool  ? "multi_turn.tool_config_path"
         : loop == AgentLoopKind::kEnv ? "agent.env_command or env_url"
                                       : "agent.program_command";
}

}  // namespace

bool AgentSections::has(AgentLoopKind loop) const {
  switch (loop) {
    case AgentLoopKind::kSingleTurn:
      return true;
    case AgentLoopKind::kTool:
      return !multi_turn.tool_config_path.empty();
    case AgentLoopKind::kEnv:
      return !agent.env_command.empty() || !agent.env_url.empty();
    case AgentLoopKind::kProgram:
      return !agent.program_command.empty();
  }
  fail(ErrorKind::kBug, "an agent loop of no kind");
}

std::optional<rollout::text::ReasoningFormat> AgentSections::reasoning() const {
  const auto format = multi_turn.reasoning_parser
                          ? find_in(rollout::text::kReasoningFormats, *multi_turn.reasoning_parser)
                          : std::nullopt;
  return format && format->on_channel() ? std::nullopt : format;
}

AgentLoopKind AgentSections::loop_of(std::string_view agent_name) const {
  if (agent_name.empty()) return agent.default_agent_loop;
  const auto loop = parse_choice<AgentLoopKind>("agent_name", agent_name);
  require(has(loop), ErrorKind::kUsage, "agent_name: a record asks for {}, which needs {}",
          agent_name, key_of(loop));
  return loop;
}

void list(ConfigTable& table, const std::string& section, AgentSections& c) {
  auto& agent = c.agent;
  table.section(section + ".agent", "Answers of several turns (docs/training/agents.md)");
  table.add(
      "default_agent_loop", agent.default_agent_loop,
      "for records without agent_name: single_turn_agent: the model answers once; tool_agent: "
      "it may call tools; env_agent: an environment says something to each answer; "
      "program_agent: a program asks the model over HTTP");
  table.add("env_command", agent.env_command,
            "for env_agent: the environment, a program with its arguments");
  table.add("env_url", agent.env_url,
            "instead: where an environment answers over HTTP, as http://host:port/path");
  table.add("env_timeout", agent.env_timeout, "seconds that it may take for an answer",
            at_least(1));
  table.add("program_command", agent.program_command,
            "for program_agent: the program, with its arguments");
  table.add("program_timeout", agent.program_timeout,
            "seconds from the model's answer to the program's next request, or its end",
            at_least(1));
  table.add_path(
      "replay_dir", agent.replay_dir,
      "folder of a run's sessions: no program is started, its answers are taken from there");
  auto& turns = c.multi_turn;
  table.section(section + ".multi_turn", "The turns of such an answer");
  table.add("max_assistant_turns", turns.max_assistant_turns,
            "turns of the model; not set: no limit", at_least(1));
  table.add("max_user_turns", turns.max_user_turns,
            "turns of tools or the environment; not set: no limit", at_least(1));
  table.add("max_parallel_calls", turns.max_parallel_calls,
            "calls of tools in one turn; further ones are left out", at_least(1));
  table.add_path(
      "tool_config_path", turns.tool_config_path,
      "for tool_agent: a JSON file of the tools, their schemas and programs, and of MCP servers");
  table.add("max_tool_response_length", turns.max_tool_response_length,
            "characters of a tool's answer that are kept", at_least(1));
  table.add("tool_response_truncate_side", turns.tool_response_truncate_side,
            "the side of a longer answer that is cut");
  auto formats = UsualLimit<rollout::text::ToolFormat>::limit();
  formats.words = "a --tool-call-parser of docs/serving/README.md";
  table.add("format", turns.format,
            "for tool_agent and program_agent: the form of calls, as vLLM names it", formats);
  auto parsers = one_of(names_of(rollout::text::kReasoningFormats));
  parsers.words = "a --reasoning-parser of the same";
  table.add("reasoning_parser", turns.reasoning_parser,
            "for both: the form of thoughts, in which no calls are read; not set: they are content",
            parsers);
}

ConfigRules<AgentSections> agent_rules() {
  return {
      {"tools_to_call",
       {".agent.default_agent_loop", ".multi_turn.tool_config_path"},
       [](const AgentSections& c) {
         return c.agent.default_agent_loop != AgentLoopKind::kTool || c.has(AgentLoopKind::kTool);
       },
       "tool_agent calls the tools of tool_config_path"},
      {"an_environment_to_act_in",
       {".agent.default_agent_loop", ".agent.env_command"},
       [](const AgentSections& c) {
         return c.agent.default_agent_loop != AgentLoopKind::kEnv || c.has(AgentLoopKind::kEnv);
       },
       "env_agent acts in the environment of env_command or env_url"},
      {"one_environment",
       {".agent.env_command", ".agent.env_url"},
       [](const AgentSections& c) {
         return c.agent.env_command.empty() || c.agent.env_url.empty();
       },
       "the environment is a program or behind a URL, not both"},
      {"an_address_of_http",
       {".agent.env_url"},
       [](const AgentSections& c) {
         const auto& url = c.agent.env_url;
         return url.empty() || url.starts_with("http://") || url.starts_with("https://");
       },
       "an environment answers over HTTP, as http://host:port/path"},
      {"thoughts_on_channels",
       {".multi_turn.reasoning_parser", ".multi_turn.format"},
       [](const AgentSections& c) {
         const auto& parser = c.multi_turn.reasoning_parser;
         return !parser ||
                (*parser == "openai_gptoss") == rollout::text::has_channels(c.multi_turn.format);
       },
       "openai_gptoss reads thoughts on channels, as format openai does, and no other one does"},
      {"a_program_to_run",
       {".agent.default_agent_loop", ".agent.program_command"},
       [](const AgentSections& c) {
         return c.agent.default_agent_loop != AgentLoopKind::kProgram ||
                c.has(AgentLoopKind::kProgram);
       },
       "program_agent runs the program of program_command"},
      {"sessions_to_play_again",
       {".agent.replay_dir", ".agent.default_agent_loop"},
       [](const AgentSections& c) { return c.agent.replay_dir.empty() || c.enabled(); },
       "single_turn_agent asks no program whose answers could be taken from somewhere else"},
  };
}

}  // namespace ferry::trainer
