// The sections of answers of several turns: how an answer comes about, and its turns.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

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
inline constexpr auto kChoices<rollout::text::ToolFormat> =
    std::to_array<Named<rollout::text::ToolFormat>>(
        {{"hermes", rollout::text::ToolFormat::kHermes},
         {"llama3_json", rollout::text::ToolFormat::kLlama3Json},
         {"deepseek_v3", rollout::text::ToolFormat::kDeepSeekV3},
         {"deepseek_v32", rollout::text::ToolFormat::kDeepSeekV32},
         {"deepseek_v4", rollout::text::ToolFormat::kDeepSeekV4},
         {"kimi_k2", rollout::text::ToolFormat::kKimiK2},
         {"minimax_m2", rollout::text::ToolFormat::kMiniMaxM2},
         {"seed_oss", rollout::text::ToolFormat::kSeedOss},
         {"openai", rollout::text::ToolFormat::kOpenAi}});

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
  bool operator==(const MultiTurnSection&) const = default;
};

struct AgentSections {
  AgentSection agent{};
  MultiTurnSection multi_turn{};
  bool operator==(const AgentSections&) const = default;

  // True if records may ask for that loop.
  bool has(AgentLoopKind loop) const;
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
