#include "trainer/agents/tools.h"

#include <gtest/gtest.h>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace tools_test {

std::string tool(const std::string& name, const std::string& command) {
  return R"({"tool_schema": {"type": "function", "function": {"name": ")" + name +
         R"("}}, "command": ")" + command + R"("})";
}

Tools read(const std::string& tools) {
  const support::TempDir dir;
  distckpt::write_text(dir / "tools.json", R"({"tools": [)" + tools + "]}");
  return read_tools(dir / "tools.json");
}

TEST(Tools, OneProgramMayBeSeveral) {
  const auto tools = read(tool("add", "a") + ", " + tool("find", "b") + ", " + tool("sub", "a"));
  EXPECT_EQ(tools.names, (std::vector<std::string>{"add", "find", "sub"}));
  EXPECT_EQ(tools.program_of, (std::vector<std::size_t>{0, 1, 0}));
  EXPECT_EQ(tools.programs.size(), 2U);
  EXPECT_EQ(tools.schemas.size(), 3U);
}

TEST(Tools, AreNoClassesOfPython) {
  const support::TempDir dir;
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"no class of Python", "docs/training/agents.md"},
                             [&] { read(R"({"class_name": "a.B", "tool_schema": {}})"); }));
  distckpt::write_text(dir / "tools.yaml", "tools:\n  - class_name: a.B\n");
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"in JSON", "docs/training/agents.md"},
                             [&] { read_tools(dir / "tools.yaml"); }));
}

TEST(Tools, MayHaveMoreTimeThanAClockCounts) {
  auto slow = tool("add", "a");
  slow.insert(1, R"("timeout": 1e30, )");
  EXPECT_GT(read(slow).programs[0].timeout, std::chrono::years(10));
}

TEST(Tools, HaveNamesOfTheirOwn) {
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"tools.json", "two tools", "add"},
                             [&] { read(tool("add", "a") + ", " + tool("add", "b")); }));
}

TEST(Tools, OfServersComeBehindThemInTheOrderOfTheirLists) {
  const support::TempDir dir;
  distckpt::write_text(
      dir / "tools.json",
      R"({"mcpServers": {"s": {"command": "it's", "args": ["-x"], "env": {"A": "b c"},)"
      R"( "tool_selected_list": ["g", "f"]}}, "tools": [)" +
          tool("add", "a") + "]}");
  auto tools = read_tools(dir / "tools.json");
  add_listed_tools(tools, nlohmann::ordered_json::parse(
                              R"({"s": [{"name": "f", "inputSchema": {"type": "object"}},)"
                              R"({"name": "h", "inputSchema": {}},)"
                              R"({"name": "g", "description": "G.", "inputSchema": {}}]})"));
  EXPECT_EQ(tools.names, (std::vector<std::string>{"add", "f", "g"}));
  EXPECT_EQ(tools.program_of, (std::vector<std::size_t>{0, 1, 1}));
  EXPECT_EQ(tools.programs[1].command, R"(exec env 'A=b c' 'it'\''s' '-x')");
  EXPECT_EQ(tools.schemas[1].dump(),
            R"({"type":"function","function":{"name":"f","parameters":{"type":"object"}}})");
  EXPECT_EQ(tools.schemas[2]["function"]["description"], "G.");
}

// The texts that verl 0.9.1's ToolAgentLoop makes.
TEST(Tools, AnswersAreCutAtASide) {
  const std::string text = "aé1234567z";
  EXPECT_EQ(truncated_tool_response(text, 10, TruncateSide::kMiddle), text);
  EXPECT_EQ(truncated_tool_response(text, 3, TruncateSide::kLeft), "(truncated)...67z");
  EXPECT_EQ(truncated_tool_response(text, 3, TruncateSide::kRight), "aé1...(truncated)");
  EXPECT_EQ(truncated_tool_response(text, 5, TruncateSide::kMiddle), "aé...(truncated)...7z");
  EXPECT_EQ(truncated_tool_response(text, 1, TruncateSide::kMiddle), "...(truncated)..." + text);
}

}  // namespace tools_test
}  // namespace ferry::trainer
