// The tools that a model may call: their schemas, which the chat template shows to it, and the
// programs that they are (docs/training/agents.md).
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "trainer/agents/agent_program.h"
#include "trainer/config/agent_sections.h"

namespace ferry::trainer {

struct Tools {
  nlohmann::ordered_json schemas{};  // a list of {"type": "function", "function": {"name", ...}}
  std::vector<std::string> names{};
  std::vector<std::size_t> program_of{};        // [names], in `programs`
  std::vector<AgentProgramOptions> programs{};  // each once, though it may be several tools
};

// {"tools": [{"tool_schema": {...}, "command": "...", "timeout": 60}]}: verl's tool_config_path,
// with a command in place of a class. Throws Error(kCorrupt | kNotFound).
Tools read_tools(const std::filesystem::path& file);

// The schemas of the tools of a run; null if it has none.
nlohmann::ordered_json tool_schemas(const AgentSections& config);

// Cuts a text of more than so many characters as verl does (tool_agent_loop.py).
std::string truncated_tool_response(std::string_view text, int most, TruncateSide side);

}  // namespace ferry::trainer
