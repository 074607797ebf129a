#include "trainer/agents/tools.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "models/distributed/messages.h"
#include "models/distributed/process_group.h"
#include "models/distributed/world.h"
#include "trainer/agents/mcp_server.h"
#include "trainer/rewards/rules/code_points.h"

namespace ferry::trainer {

using nlohmann::ordered_json;

namespace {

std::chrono::milliseconds timeout_of(const ordered_json& entry, const std::string& source) {
  const auto seconds = entry.value("timeout", ordered_json(60));
  require(seconds.is_number() && seconds.get<double>() > 0, ErrorKind::kCorrupt,
          "{}: a timeout is seconds above 0", source);
  constexpr double kLongest = 1e9;  // which the clock counts, in nanoseconds
  const auto most = std::min(seconds.get<double>(), kLongest);
  return std::chrono::milliseconds(static_cast<std::int64_t>(most * 1000));
}

std::size_t place_of(Tools& tools, AgentProgramOptions program) {
  const auto known = std::ranges::find(tools.programs, program);
  const auto place = static_cast<std::size_t>(known - tools.programs.begin());
  if (known == tools.programs.end()) tools.programs.push_back(std::move(program));
  return place;
}

void add_tool(Tools& tools,
              const ordered_json& schema,
              std::size_t program,
              const std::string& source) {
  const ordered_json::json_pointer name("/function/name");
  require(schema.is_object() && schema.contains(name) && schema[name].is_string(),
          ErrorKind::kCorrupt, "{}: a tool_schema has no function with a name", source);
  tools.program_of.push_back(program);
  tools.schemas.push_back(schema);
  tools.names.push_back(schema[name].get<std::string>());
  require(std::ranges::count(tools.names, tools.names.back()) == 1, ErrorKind::kCorrupt,
          "{}: two tools have the name {}", source, tools.names.back());
}

// For /bin/sh.
std::string quoted_word(const std::string& word) {
  std::string quoted = "'";
  for (const char c : word) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::vector<std::string> texts_of(const ordered_json& server,
                                  const char* key,
                                  const std::string& source) {
  const auto list = server.value(key, ordered_json::array());
  require(list.is_array() && std::ranges::all_of(list, [](const auto& v) { return v.is_string(); }),
          ErrorKind::kCorrupt, "{}: {} is a list of texts", source, key);
  return list.get<std::vector<std::string>>();
}

std::string server_command(const ordered_json& server, const std::string& source) {
  require(server.is_object() && server.contains("command") && server["command"].is_string(),
          ErrorKind::kCorrupt,
          "{}: a server has a command: it is spoken to over its standard input and output", source);
  std::string command = "exec env";
  const auto env = server.value("env", ordered_json::object());
  require(env.is_object(), ErrorKind::kCorrupt, "{}: env is an object of texts", source);
  for (const auto& [name, value] : env.items()) {
    require(value.is_string(), ErrorKind::kCorrupt, "{}: env is an object of texts", source);
    command += " " + quoted_word(name + "=" + value.get<std::string>());
  }
  command += " " + quoted_word(server["command"].get<std::string>());
  for (const auto& word : texts_of(server, "args", source)) command += " " + quoted_word(word);
  return command;
}

// The schema of a tool that a server lists.
ordered_json schema_of(const ordered_json& tool, const std::string& source) {
  require(tool.is_object() && tool.contains("name") && tool.contains("inputSchema"),
          ErrorKind::kCorrupt, "{}: a tool has a name and an inputSchema", source);
  ordered_json function{{"name", tool["name"]}};
  if (tool.contains("description")) function["description"] = tool["description"];
  function["parameters"] = tool["inputSchema"];
  return {{"type", "function"}, {"function", std::move(function)}};
}

}  // namespace

Tools read_tools(const std::filesystem::path& file) {
  const auto source = file.string();
  const auto extension = file.extension();
  require(extension != ".yaml" && extension != ".yml", ErrorKind::kCorrupt,
          "{}: tools are named in JSON, each a program and no class of Python: "
          "docs/training/agents.md has the form",
          source);
  const auto config = distckpt::parse_ordered_json(distckpt::read_text(file), source);
  const auto refuse = [&](bool wrong, std::string_view why) {
    require(!wrong, ErrorKind::kCorrupt, "{}: {}", source, why);
  };
  const auto list =
      config.is_object() ? config.value("tools", ordered_json::array()) : ordered_json();
  const auto servers =
      config.is_object() ? config.value("mcpServers", ordered_json::object()) : ordered_json();
  refuse(!list.is_array() || !servers.is_object() || (list.empty() && servers.empty()),
         "has no list of tools");
  Tools tools{.schemas = ordered_json::array()};
  for (const auto& tool : list) {
    refuse(tool.is_object() && tool.contains("class_name") && !tool.contains("command"),
           "a tool is a program, with a command, and no class of Python: docs/training/agents.md "
           "has the form");
    refuse(!tool.is_object() || !tool.contains("tool_schema") || !tool.contains("command") ||
               !tool["command"].is_string(),
           "a tool has a tool_schema and a command");
    const auto program = place_of(tools, {.command = tool["command"].get<std::string>(),
                                          .timeout = timeout_of(tool, source)});
    add_tool(tools, tool["tool_schema"], program, source);
  }
  for (const auto& [name, server] : servers.items()) {
    const auto subject = fmt::format("{}: MCP server {}", source, name);
    const auto program = place_of(tools, {.command = server_command(server, subject),
                                          .timeout = timeout_of(server, subject),
                                          .protocol = AgentProtocol::kMcp});
    tools.servers.push_back(
        {.name = name,
         .program = program,
         .tool_selected_list = texts_of(server, "tool_selected_list", subject)});
  }
  return tools;
}

ordered_json list_tools(const Tools& tools) {
  ordered_json listed;
  for (const auto& server : tools.servers)
    listed[server.name] = McpServer(tools.programs[server.program]).list_tools(server.name);
  return listed;
}

void add_listed_tools(Tools& tools, ordered_json listed) {
  for (const auto& server : tools.servers) {
    const auto source = "MCP server " + server.name;
    require(listed.is_object() && listed.contains(server.name), ErrorKind::kCorrupt,
            "{}: has no list of tools", source);
    auto missing = server.tool_selected_list;
    for (const auto& tool : listed[server.name]) {
      const auto schema = schema_of(tool, source);
      if (!server.tool_selected_list.empty() &&
          std::erase(missing, schema["function"]["name"].get<std::string>()) == 0)
        continue;
      add_tool(tools, schema, server.program, source);
    }
    require(missing.empty(), ErrorKind::kCorrupt, "{}: lists no tool {}", source,
            fmt::join(missing, ", "));
  }
  tools.listed = std::move(listed);
}

void write_listed_tools(const Tools& tools, const std::filesystem::path& folder) {
  distckpt::replace_text(folder / kListedToolsFile, tools.listed.dump(1) + "\n");
}

Tools shared_tools(const AgentSections& config, models::World& world) {
  if (!config.has(AgentLoopKind::kTool)) return {};
  auto tools = read_tools(config.multi_turn.tool_config_path);
  if (tools.servers.empty()) return tools;
  if (!config.agent.replay_dir.empty()) {
    const auto file = std::filesystem::path(config.agent.replay_dir) / kListedToolsFile;
    add_listed_tools(tools, distckpt::parse_ordered_json(distckpt::read_text(file), file.string()));
    return tools;
  }
  std::vector<int> ranks(static_cast<std::size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  const models::ProcessGroup group(world, "tools", std::move(ranks));
  // Text, so that members keep their order.
  const auto listed =
      models::broadcast(group, world.rank() == 0 ? list_tools(tools).dump() : std::string(), 0);
  add_listed_tools(tools, distckpt::parse_ordered_json(listed, "the lists of MCP servers"));
  return tools;
}

std::string truncated_tool_response(std::string_view text, int most, TruncateSide side) {
  const auto characters = code_points::decode(text);
  const auto whole = code_points::View(characters);
  const auto size = static_cast<std::size_t>(most);
  if (whole.size() <= size) return std::string(text);
  const auto last = [&](std::size_t count) {  // Python's text[-0:] is all of it
    return code_points::encode(count == 0 ? whole : code_points::last(whole, count));
  };
  switch (side) {
    case TruncateSide::kLeft:
      return "(truncated)..." + last(size);
    case TruncateSide::kRight:
      return code_points::encode(whole.substr(0, size)) + "...(truncated)";
    case TruncateSide::kMiddle:
      break;
  }
  return code_points::encode(whole.substr(0, size / 2)) + "...(truncated)..." + last(size / 2);
}

}  // namespace ferry::trainer
