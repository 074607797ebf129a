#include "trainer/agents/mcp_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "rollout/text/shallow_json.h"

namespace ferry::trainer {

using nlohmann::json;
using nlohmann::ordered_json;

namespace {

constexpr const char* kInitialize = "initialize";  // also the id of that request
// Revisions whose tools are called alike; the newest is offered.
constexpr std::array<std::string_view, 4> kRevisions{"2025-11-25", "2025-06-18", "2025-03-26",
                                                     "2024-11-05"};
constexpr int kMethodNotFound = -32601;
constexpr std::size_t kMostTools = 10000;
constexpr std::size_t kMostPages = 1000;
constexpr std::size_t kMostUnsent = 1'000'000;  // bytes that wait while the server asks for more

std::string said_text(const ordered_json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

// A member that is text, or "".
std::string text_member(const ordered_json& object, const char* name) {
  if (!object.is_object()) return "";
  const auto found = object.find(name);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

// A member that is a list, or an empty one.
ordered_json list_member(const ordered_json& object, const char* name) {
  const auto found = object.find(name);
  return found != object.end() && found->is_array() ? *found : ordered_json::array();
}

// A block of content as text.
std::string text_of_block(const ordered_json& block) {
  const auto type = text_member(block, "type");
  if (type == "text") return text_member(block, "text");
  if (type == "resource" && block.contains("resource") && block["resource"].contains("text"))
    return text_member(block["resource"], "text");
  return fmt::format("[{}]", type);
}

json answer_of_call(const ordered_json& said) {
  if (said.contains("error")) {
    const auto message = text_member(said["error"], "message");
    return {{"error", message.empty() ? said_text(said["error"]) : message}};
  }
  const auto& result = said.at("result");
  std::string text;
  const auto blocks = list_member(result, "content");
  for (std::size_t i = 0; i < blocks.size(); ++i)
    text += (i > 0 ? "\n" : "") + text_of_block(blocks[i]);
  if (blocks.empty() && result.contains("structuredContent"))
    text = said_text(result["structuredContent"]);
  const auto failed = result.value("isError", ordered_json(false));
  return {{failed == true ? "error" : "content", text}};
}

}  // namespace

void McpServer::request(json id, const std::string& method, json params) {
  send({{"jsonrpc", "2.0"},
        {"id", std::move(id)},
        {"method", method},
        {"params", std::move(params)}});
}

void McpServer::begin() {
  ready_ = false;
  waiting_.clear();
  request(kInitialize, kInitialize,
          {{"protocolVersion", kRevisions.front()},
           {"capabilities", json::object()},
           {"clientInfo", {{"name", "ferry"}, {"version", "1"}}}});
}

void McpServer::put(std::int64_t id, json question) {
  if (!ready_) {
    question["id"] = id;
    waiting_.push_back(std::move(question));
  } else if (id < 0) {
    request(id, "tools/list", std::move(question));
  } else {
    request(id, "tools/call",
            {{"name", question.at("name")},
             {"arguments", question.at("arguments")},
             {"_meta", {{"session", question.at("session")}}}});
  }
}

void McpServer::initialized(const ordered_json& said) {
  if (said.contains("error"))
    fail(ErrorKind::kIo, "the server is not initialized: {}", said_text(said["error"]));
  const auto revision = text_member(said.at("result"), "protocolVersion");
  require(std::ranges::find(kRevisions, revision) != kRevisions.end(), ErrorKind::kIo,
          "the server speaks {} of the Model Context Protocol", revision);
  send({{"jsonrpc", "2.0"}, {"method", "notifications/initialized"}});
  ready_ = true;
  for (auto& question : std::exchange(waiting_, {})) {
    const auto id = question.at("id").get<std::int64_t>();
    question.erase("id");
    put(id, std::move(question));
  }
}

void McpServer::hear(const std::string& line, std::vector<AgentAnswer>& answers) {
  require(!rollout::text::nests_deeply(line), ErrorKind::kCorrupt,
          "the server wrote a line that is nested too deep");
  const auto said = rollout::text::parse_shallow_json(line);
  if (said.is_array()) {  // a batch, as revision 2025-03-26 has it
    for (const auto& one : said) hear(one, answers);
    return;
  }
  hear(said, answers);
}

void McpServer::hear(const ordered_json& said, std::vector<AgentAnswer>& answers) {
  // Servers that print something else into their messages are known: other clients skip it, too.
  if (!said.is_object()) return;
  const auto id = said.find("id");
  if (said.contains("method")) {
    if (id == said.end()) return;  // a notification
    require(unsent_bytes() <= kMostUnsent, ErrorKind::kIo,
            "the server asks and asks, and does not read the answers");
    json reply{{"jsonrpc", "2.0"}, {"id", *id}};
    if (said["method"] == "ping")
      reply["result"] = json::object();
    else
      reply["error"] = {{"code", kMethodNotFound}, {"message", "Method not found"}};
    send(reply);
    return;
  }
  const bool answers_one =
      id != said.end() &&
      (said.contains("error") || (said.contains("result") && said["result"].is_object()));
  if (answers_one && !ready_ && *id == kInitialize) return initialized(said);
  const bool has_number = answers_one && id->is_number_integer();
  const auto number = has_number ? id->get<std::int64_t>() : 0;
  if (has_number && is_late(number)) return;
  require(has_number && close(number), ErrorKind::kCorrupt,
          "the server answered something else than it was asked");
  if (number >= 0 || said.contains("error")) {
    answers.push_back({number, answer_of_call(said)});
    return;
  }
  const auto& page = said["result"];
  for (const auto& tool : list_member(page, "tools")) listed_.push_back(tool);
  answers.push_back({number, {{"nextCursor", text_member(page, "nextCursor")}}});
}

ordered_json McpServer::list_tools(const std::string& name) {
  constexpr std::chrono::milliseconds kWait(100);
  listed_ = ordered_json::array();
  std::size_t num_pages = 0;
  for (json params = json::object();;) {
    ask(next_page_, params);
    std::vector<AgentAnswer> page;
    while (page.empty()) page = answers(kWait);
    --next_page_;
    const auto& answer = page.front().answer;
    require(!answer.contains("error"), ErrorKind::kIo, "MCP server {}: lists no tools: {}", name,
            answer.value("error", ""));
    const auto cursor = answer.at("nextCursor").get<std::string>();
    if (cursor.empty()) return std::move(listed_);
    require(++num_pages < kMostPages && listed_.size() < kMostTools, ErrorKind::kCorrupt,
            "MCP server {}: the list of its tools has no end", name);
    params = {{"cursor", cursor}};
  }
}

}  // namespace ferry::trainer
