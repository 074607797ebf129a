// The folder DAG of docs/dataflow.md, held by reading every #include.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>

namespace ferry {
namespace {

namespace fs = std::filesystem;

TEST(Layering, EveryIncludeFollowsTheFolderGraph) {
  const std::map<std::string, std::set<std::string>> allowed{
      {"distckpt", {"distckpt"}},
      {"converter", {"converter", "distckpt"}},
      {"cli", {"cli", "converter", "distckpt"}},
  };
  const fs::path root = std::getenv("FERRY_SOURCE_ROOT");
  const std::regex own(R"re(^\s*#include "(\w+)/)re");
  const std::regex torch(R"re(^\s*#include <(torch|ATen|c10)/)re");
  int seen = 0;
  for (const auto& [folder, uses] : allowed) {
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      if (entry.path().extension() != ".h" && entry.path().extension() != ".cc") continue;
      std::ifstream file(entry.path());
      for (std::string line; std::getline(file, line);) {
        std::smatch match;
        EXPECT_FALSE(std::regex_search(line, torch)) << entry.path() << ": " << line;
        if (!std::regex_search(line, match, own)) continue;
        ++seen;
        EXPECT_TRUE(uses.contains(match[1])) << entry.path() << ": " << line;
      }
    }
  }
  EXPECT_GT(seen, 100);
}

}  // namespace
}  // namespace ferry
