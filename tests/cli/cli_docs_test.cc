// docs/cli.md lists exactly the subcommands and options that --help prints.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace ferry {
namespace cli_docs_test {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : value;
}

bool has_models() {
  return std::filesystem::exists(std::filesystem::path(environment("FERRY")).parent_path() /
                                 "ferry-torch");
}

// The output of `ferry ARGUMENTS` on stdout; nothing if it fails.
std::string output_of_ferry(const std::string& arguments) {
  FILE* pipe = popen(("\"$FERRY\" " + arguments).c_str(), "r");
  if (pipe == nullptr) return {};
  std::string text;
  std::array<char, 4096> buffer{};
  while (const auto count = std::fread(buffer.data(), 1, buffer.size(), pipe))
    text.append(buffer.data(), count);
  return pclose(pipe) == 0 ? text : std::string();
}

// The subcommands of the program of models, and how docs/cli.md calls them.
const std::map<std::string, std::vector<std::string>> kOfModels{
    {"bench", {"bench rollout"}},
    {"generate", {"generate"}},
    {"serve", {"serve"}},
    {"train", {"train grpo", "train ppo", "train replica", "train sft"}}};

// The sections of docs/cli.md by heading: "ferry", "ferry convert".
std::map<std::string, std::string> read_sections() {
  std::ifstream file(std::filesystem::path(environment("FERRY_SOURCE_ROOT")) / "docs" / "cli.md");
  std::map<std::string, std::string> sections;
  std::string heading;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("## ")) heading = line.substr(3);
    if (!heading.empty()) sections[heading] += line + "\n";
  }
  return sections;
}

std::set<std::string> matches(const std::string& text, const std::regex& pattern) {
  std::set<std::string> found;
  for (std::sregex_iterator at(text.begin(), text.end(), pattern), end; at != end; ++at)
    found.insert(at->str(1));
  return found;
}

// "--dry-run" of "--dry-run=read", too. Each subcommand has --help, which is said once.
std::set<std::string> long_flags(const std::string& text, bool with_help = false) {
  static const std::regex pattern("(--[a-z][a-z0-9-]*)");
  auto flags = matches(text, pattern);
  if (!with_help) flags.erase("--help");
  return flags;
}

std::set<std::string> subcommands(const std::string& of = "") {
  const auto help = output_of_ferry(of + " --help");
  const auto list = help.find("Subcommands:");
  if (list == std::string::npos) return {};
  static const std::regex pattern("\n  ([a-z]+) ");
  return matches(help.substr(list), pattern);
}

class CliDocs : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(environment("FERRY"), "") << "FERRY names the program";
    ASSERT_NE(environment("FERRY_SOURCE_ROOT"), "") << "FERRY_SOURCE_ROOT names the checkout";
  }
};

TEST_F(CliDocs, HaveASectionForEachSubcommandAndNoOther) {
  std::set<std::string> expected{"ferry", "ferry verify --logits"};
  for (const auto& name : subcommands()) {
    const auto found = kOfModels.find(name);
    for (const auto& command : found == kOfModels.end() ? std::vector{name} : found->second)
      expected.insert("ferry " + command);
  }
  ASSERT_GT(expected.size(), 1U) << "ferry --help lists no subcommands";
  std::set<std::string> headings;
  for (const auto& [heading, text] : read_sections()) headings.insert(heading);
  EXPECT_EQ(headings, expected);
}

TEST_F(CliDocs, ListEveryGlobalOptionAndNoOther) {
  EXPECT_EQ(long_flags(read_sections()["ferry"], true),
            long_flags(output_of_ferry("--help"), true));
}

TEST_F(CliDocs, ListEveryOptionOfEachSubcommandAndNoOther) {
  auto sections = read_sections();
  for (const auto& name : subcommands()) {
    if (kOfModels.contains(name)) continue;
    SCOPED_TRACE("ferry " + name);
    auto printed = long_flags(output_of_ferry(name + " --help"));
    for (const auto& own : subcommands(name))
      printed.merge(
          long_flags(output_of_ferry(std::string(name).append(" ").append(own).append(" --help"))));
    EXPECT_FALSE(printed.empty());
    EXPECT_EQ(long_flags(sections["ferry " + name]), printed);
  }
}

TEST_F(CliDocs, ListEveryOptionOfTheProgramOfModelsAndNoOther) {
  if (!has_models()) GTEST_SKIP() << "this build has no models";
  std::vector<std::string> commands{"verify --logits"};
  for (const auto& [name, own] : kOfModels) commands.insert(commands.end(), own.begin(), own.end());
  for (const auto& command : commands) {
    SCOPED_TRACE(command);
    const auto printed = long_flags(output_of_ferry(command + " --help"));
    EXPECT_FALSE(printed.empty());
    EXPECT_EQ(long_flags(read_sections()["ferry " + command]), printed);
  }
}

}  // namespace cli_docs_test
}  // namespace ferry
