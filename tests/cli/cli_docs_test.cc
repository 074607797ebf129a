// docs/cli.md lists exactly the options that --help prints.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>

namespace ferry {
namespace {

std::string output_of(const std::string& command) {
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) return {};
  std::string text;
  std::array<char, 4096> buffer{};
  while (const auto count = std::fread(buffer.data(), 1, buffer.size(), pipe))
    text.append(buffer.data(), count);
  pclose(pipe);
  return text;
}

std::set<std::string> long_flags(const std::string& text) {
  static const std::regex pattern("--[a-z][a-z-]*");
  std::set<std::string> flags;
  for (std::sregex_iterator at(text.begin(), text.end(), pattern), end; at != end; ++at)
    flags.insert(at->str());
  flags.erase("--help");
  return flags;
}

class CliDocs : public testing::TestWithParam<const char*> {};

TEST_P(CliDocs, ListsEveryOptionThatHelpPrintsAndNoOther) {
  const std::string command = GetParam();
  const auto help = output_of(std::string(std::getenv("FERRY")) + " " + command + " --help");
  const auto path = std::filesystem::path(std::getenv("FERRY_SOURCE_ROOT")) / "docs" / "cli.md";
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  auto section = text.str();
  const auto begin = section.find("## ferry " + command);
  ASSERT_NE(begin, std::string::npos);
  section = section.substr(begin, section.find("\n## ", begin) - begin);
  EXPECT_EQ(long_flags(section), long_flags(help));
}

INSTANTIATE_TEST_SUITE_P(Subcommands,
                         CliDocs,
                         testing::Values("convert", "inspect", "verify", "digest"),
                         [](const auto& parameter) { return std::string(parameter.param); });

}  // namespace
}  // namespace ferry
