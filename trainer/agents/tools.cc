#include "trainer/agents/tools.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "trainer/rewards/code_points.h"

namespace ferry::trainer {

using nlohmann::ordered_json;

Tools read_tools(const std::filesystem::path& file) {
  const auto source = file.string();
  const auto config = distckpt::parse_ordered_json(distckpt::read_text(file), source);
  const auto refuse = [&](bool wrong, std::string_view why) {
    require(!wrong, ErrorKind::kCorrupt, "{}: {}", source, why);
  };
  refuse(!config.is_object() || !config.contains("tools") || !config["tools"].is_array() ||
             config["tools"].empty(),
         "has no list of tools");
  Tools tools{.schemas = ordered_json::array()};
  for (const auto& tool : config["tools"]) {
    refuse(!tool.is_object() || !tool.contains("tool_schema") || !tool.contains("command") ||
               !tool["command"].is_string(),
           "a tool has a tool_schema and a command");
    const ordered_json::json_pointer name("/function/name");
    const auto& schema = tool["tool_schema"];
    refuse(!schema.is_object() || !schema.contains(name) || !schema[name].is_string(),
           "a tool_schema has no function with a name");
    const auto seconds = tool.value("timeout", ordered_json(60));
    refuse(!seconds.is_number() || seconds.get<double>() <= 0, "a timeout is seconds above 0");
    const AgentProgramOptions program{.command = tool["command"].get<std::string>(),
                                      .timeout = std::chrono::milliseconds(
                                          static_cast<std::int64_t>(seconds.get<double>() * 1000))};
    const auto known = std::ranges::find_if(tools.programs, [&](const auto& one) {
      return one.command == program.command && one.timeout == program.timeout;
    });
    tools.program_of.push_back(static_cast<std::size_t>(known - tools.programs.begin()));
    if (known == tools.programs.end()) tools.programs.push_back(program);
    tools.schemas.push_back(schema);
    tools.names.push_back(schema[name].get<std::string>());
    refuse(std::ranges::count(tools.names, tools.names.back()) > 1,
           "two tools have the name " + tools.names.back());
  }
  return tools;
}

ordered_json tool_schemas(const AgentSections& config) {
  const auto& file = config.multi_turn.tool_config_path;
  return file.empty() ? ordered_json() : read_tools(file).schemas;
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
