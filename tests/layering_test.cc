// The folder DAG of docs/dataflow.md, held by reading every #include; and files that stay short.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace ferry {
namespace layering_test {

namespace fs = std::filesystem;

struct Include {
  std::string file{};  // "distckpt/box.cc"
  int line = 0;
  std::string path{};  // "distckpt/box.h"
  bool quoted = false;

  std::string where() const { return file + ":" + std::to_string(line); }
  std::string folder() const { return path.substr(0, path.find('/')); }
  bool has_folder() const { return path.find('/') != std::string::npos; }
};

fs::path source_root() {
  const char* root = std::getenv("FERRY_SOURCE_ROOT");
  return root == nullptr ? fs::path() : fs::path(root);
}

std::vector<fs::path> sources_of(const std::string& folder) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::recursive_directory_iterator(source_root() / folder)) {
    const auto extension = entry.path().extension();
    if (extension == ".h" || extension == ".cc") found.push_back(entry.path());
  }
  return found;
}

std::vector<std::string> lines_of(const fs::path& path) {
  std::vector<std::string> lines;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

std::vector<Include> includes_of(const std::string& folder) {
  static const std::regex directive(R"re(^\s*#\s*include\s*([<"])([^>"]+)[>"])re");
  std::vector<Include> found;
  for (const auto& path : sources_of(folder)) {
    int number = 0;
    for (const auto& line : lines_of(path)) {
      ++number;
      std::smatch match;
      if (!std::regex_search(line, match, directive)) continue;
      found.push_back({.file = fs::relative(path, source_root()).generic_string(),
                       .line = number,
                       .path = match[2],
                       .quoted = match[1] == "\""});
    }
  }
  return found;
}

// What the files of a folder may include of ours. Nobody but cli includes cli.
const std::map<std::string, std::set<std::string>> kAllowed{
    {"distckpt", {"distckpt"}},
    {"converter", {"converter", "distckpt"}},
    {"models", {"models", "distckpt"}},
    {"rollout", {"rollout", "models", "distckpt"}},
    {"rollout/text", {"rollout", "distckpt"}},
    {"trainer", {"trainer", "rollout", "models", "converter", "distckpt"}},
    {"cli", {"cli", "trainer", "rollout", "converter", "distckpt"}},
    {"tests", {"tests", "trainer", "rollout", "models", "converter", "distckpt"}},
    {"tests/distckpt", {"tests", "distckpt"}},
};

// The parts of other folders that belong to the program with LibTorch.
bool uses_torch(const std::string& file) {
  return file.starts_with("converter/alignment/") || file.starts_with("cli/torch/");
}

TEST(Layering, EveryIncludeFollowsTheFolderGraph) {
  for (const auto& [folder, uses] : kAllowed) {
    int ours = 0;
    for (const auto& include : includes_of(folder)) {
      if (!include.quoted) continue;
      EXPECT_TRUE(include.has_folder())
          << include.where() << ": \"" << include.path << "\" is not spelled from the root";
      EXPECT_TRUE(uses.contains(include.folder()) ||
                  (include.folder() == "models" && uses_torch(include.file)))
          << include.where() << ": " << folder << " includes " << include.path;
      ++ours;
    }
    EXPECT_GT(ours, 10) << folder;
  }
}

TEST(Layering, OurHeadersAreInQuotesAndOthersAreNot) {
  for (const auto& [folder, uses] : kAllowed) {
    for (const auto& include : includes_of(folder)) {
      EXPECT_EQ(include.quoted, include.has_folder() && kAllowed.contains(include.folder()))
          << include.where() << ": " << include.path;
    }
  }
}

TEST(Layering, NoTorchOrPythonHeaderIsIncluded) {
  const std::set<std::string> refused{"torch", "ATen", "c10", "caffe2", "pybind11", "Python.h"};
  for (const char* folder : {"distckpt", "converter", "rollout/text", "trainer/config",
                             "trainer/data", "trainer/metrics", "trainer/rewards", "cli"}) {
    for (const auto& include : includes_of(folder)) {
      if (uses_torch(include.file)) continue;
      EXPECT_FALSE(refused.contains(include.folder())) << include.where() << ": " << include.path;
    }
  }
}

TEST(Layering, NothingOutsideTestsIncludesATest) {
  for (const char* folder : {"distckpt", "converter", "models", "rollout", "trainer", "cli"}) {
    for (const auto& include : includes_of(folder)) {
      EXPECT_EQ(include.path.find("tests/"), std::string::npos)
          << include.where() << ": " << include.path;
    }
  }
}

constexpr std::size_t kLongestFile = 500;

// The files that are longer, and why they are not two.
const std::map<std::string, std::string> kLongFiles{
    {"distckpt/pickle_parser.cc", "one opcode after the other of one machine, over one stack"},
    {"rollout/text/unicode_tables.cc", "tables, which tests/interop/make_unicode_tables.py writes"},
};

TEST(Layering, NoFileIsLongWithoutAReason) {
  std::set<std::string> long_files;
  for (const char* folder : {"distckpt", "converter", "models", "rollout", "trainer", "cli"}) {
    for (const auto& path : sources_of(folder)) {
      const auto name = fs::relative(path, source_root()).generic_string();
      const auto count = lines_of(path).size();
      if (count <= kLongestFile) continue;
      long_files.insert(name);
      EXPECT_TRUE(kLongFiles.contains(name)) << name << " has " << count << " lines";
    }
  }
  for (const auto& [name, reason] : kLongFiles) {
    EXPECT_TRUE(long_files.contains(name)) << name << " is short now: take it off the list";
    EXPECT_FALSE(reason.empty());
  }
}

}  // namespace layering_test
}  // namespace ferry
