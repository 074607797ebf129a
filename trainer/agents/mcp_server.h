// Tools of a server of the Model Context Protocol (modelcontextprotocol.io, revisions 2024-11-05 to
// 2025-11-25) over its standard input and output: JSON-RPC 2.0, a message on each line.
//
//   initialize -> notifications/initialized -> tools/list -> tools/call, tools/call, ...
//
// A question is {"name", "arguments", "session"}, the last of which goes into `_meta`; an answer is
// {"content": "..."}, or {"error": "..."}, as that of any program. Texts of the result are joined
// by newlines; a block that is no text is its type in brackets. A result without blocks is its
// structuredContent.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trainer/agents/agent_program.h"

namespace ferry::trainer {

class McpServer : public AgentProgram {
 public:
  using AgentProgram::AgentProgram;

  // All tools, as the server lists them: {"name", "description", "inputSchema"}. Waits for them.
  // Throws Error(kIo) if the server does not say, `name` being the server's.
  nlohmann::ordered_json list_tools(const std::string& name);

 protected:
  void begin() override;
  void put(std::int64_t id, nlohmann::json question) override;
  void hear(const std::string& line, std::vector<AgentAnswer>& answers) override;

 private:
  void request(nlohmann::json id, const std::string& method, nlohmann::json params);
  void hear(const nlohmann::ordered_json& said, std::vector<AgentAnswer>& answers);
  void initialized(const nlohmann::ordered_json& said);

  bool ready_ = false;                   // initialized
  std::vector<nlohmann::json> waiting_;  // until then
  nlohmann::ordered_json listed_;        // pages of the list, which have negative ids
  std::int64_t next_page_ = -1;
};

}  // namespace ferry::trainer
