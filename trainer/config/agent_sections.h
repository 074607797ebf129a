// The sections of answers of several turns: how an answer comes about, and its turns.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "rollout/text/reasoning_format.h"
#include "rollout/text/tool_format.h"
#include "trainer/config/choice.h"
#include "trainer/config/config_rules.h"
#include "trainer/config/config_table.h"

namespace ferry::trainer {

enum class AgentLoopKind : std::uint8_t {
  kSingleTurn,  // the model answers once
  kTool,        // it calls tools, and goes on with what they say
  kEnv,         // an environment says something to each answer, until it is done
  kProgram,     // a program of the user's asks the model over HTTP
};
template <>
inline constexpr auto kChoices<AgentLoopKind> =
    std::to_array<Named<AgentLoopKind>>({{"single_turn_agent", AgentLoopKind::kSingleTurn},
                                         {"tool_agent", AgentLoopKind::kTool},
                                         {"env_agent", AgentLoopKind::kEnv},
                                         {"program_agent", AgentLoopKind::kProgram}});

// The side of an answer that is too long where it is cut.
enum class TruncateSide : std::uint8_t { kLeft, kMiddle, kRight };
template <>
inline constexpr auto kChoices<TruncateSide> =
    std::to_array<Named<TruncateSide>>({{"left", TruncateSide::kLeft},
                                        {"middle", TruncateSide::kMiddle},
                                        {"right", TruncateSide::kRight}});

template <>
inline constexpr auto kChoices<rollout::text::ToolFormat> = rollout::text::kToolFormats;

struct AgentSection {  // actor_rollout_ref.rollout.agent
  AgentLoopKind default_agent_loop = AgentLoopKind::kSingleTurn;
  std::string env_command{};      // a program: docs/training/agents.md
  std::string env_url{};          // of an environment that answers over HTTP
  int env_timeout = 60;           // seconds
  std::string program_command{};  // of program_agent
  int program_timeout = 600;      // seconds
  std::string replay_dir{};       // a run's sessions, whose answers are taken
  bool operator==(const AgentSection&) const = default;
};

struct MultiTurnSection {                    // actor_rollout_ref.rollout.multi_turn
  std::optional<int> max_assistant_turns{};  // default: no limit
  std::optional<int> max_user_turns{};       // default: no limit
  int max_parallel_calls = 1;
  std::string tool_config_path{};
  int max_tool_response_length = 256;  // characters
  TruncateSide tool_response_truncate_side = TruncateSide::kMiddle;
  rollout::text::ToolFormat format = rollout::text::ToolFormat::kHermes;
  std::optional<std::string> reasoning_parser{};  // default: thoughts are content
  bool operator==(const MultiTurnSection&) const = default;
};

struct AgentSections {
  AgentSection agent{};
  MultiTurnSection multi_turn{};
  bool operator==(const AgentSections&) const = default;

  // True if records may ask for that loop.
  bool has(AgentLoopKind loop) const;
  // Nothing where thoughts are content, or on channels that the form of calls reads.
  std::optional<rollout::text::ReasoningFormat> reasoning() const;
  // True if an answer may have several turns.
  bool enabled() const {
    return has(AgentLoopKind::kTool) || has(AgentLoopKind::kEnv) || has(AgentLoopKind::kProgram);
  }
  // The loop of a record with this agent_name; "": the default one. Throws Error(kUsage) for a name
  // that is none, or of a loop that the run does not have.
  AgentLoopKind loop_of(std::string_view agent_name) const;
};

// Lists both below `section`.
void list(ConfigTable& table, const std::string& section, AgentSections& c);
ConfigRules<AgentSections> agent_rules();

}  // namespace ferry::trainer
