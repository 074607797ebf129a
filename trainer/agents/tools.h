// The tools that a model may call: their schemas, which the chat template shows to it, and the
// programs and servers that they are of (docs/training/agents.md).
#pragma once

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "trainer/agents/agent_program.h"
#include "trainer/config/agent_sections.h"

namespace ferry::models {
class World;
}

namespace ferry::trainer {

inline constexpr const char* kListedToolsFile = "tools.json";  // beside the journal of sessions

// A server of the Model Context Protocol.
struct ToolServer {
  std::string name{};
  std::size_t program = 0;
  std::vector<std::string> tool_selected_list{};  // none: all of its tools
};

struct Tools {
  nlohmann::ordered_json schemas{};  // a list of {"type": "function", "function": {"name", ...}}
  std::vector<std::string> names{};
  std::vector<std::size_t> program_of{};        // [names], in `programs`
  std::vector<AgentProgramOptions> programs{};  // each once, though it may be several tools
  std::vector<ToolServer> servers{};
  nlohmann::ordered_json listed{};  // {"<server>": its tools, as it listed them}, or null
};

// {"tools": [{"tool_schema": {...}, "command": "...", "timeout": 60}],
//  "mcpServers": {"<name>": {"command": "...", "args": [...], "env": {...}, "timeout": 60,
//                            "tool_selected_list": [...]}}}
// of which one may be missing: verl's tool_config_path, with a command in place of a class, and the
// servers as other clients of MCP have them. Their tools have still to be added. Throws
// Error(kCorrupt | kNotFound).
Tools read_tools(const std::filesystem::path& file);

// Starts each server for as long as it lists its tools. Throws Error(kIo).
nlohmann::ordered_json list_tools(const Tools& tools);
// Adds what servers have listed, behind the other tools, in the order of the file. Throws
// Error(kCorrupt) for a tool that is none, for a name that is there twice, for a selected one that
// is not listed.
void add_listed_tools(Tools& tools, nlohmann::ordered_json listed);
// Writes `listed` for a run that is played again: FOLDER/tools.json. Throws Error(kIo).
void write_listed_tools(const Tools& tools, const std::filesystem::path& folder);

// The tools of a run, `schemas` null if it has none: the same on all ranks, which call this
// together. A run that is played again takes the lists of the run before.
Tools shared_tools(const AgentSections& config, models::World& world);

// Cuts a text of more than so many characters as verl does (tool_agent_loop.py).
std::string truncated_tool_response(std::string_view text, int most, TruncateSide side);

}  // namespace ferry::trainer
