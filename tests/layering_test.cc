// The graph of folders, held by reading every #include; files that stay short, and folders that are
// no crowd.
#include <gtest/gtest.h>

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
namespace layering_test {

namespace fs = std::filesystem;

struct Include {
  std::string file{};  // "distckpt/base/box.cc"
  int line = 0;
  std::string path{};  // "distckpt/base/box.h"
  bool quoted = false;

  std::string where() const { return file + ":" + std::to_string(line); }
  std::string folder() const { return path.substr(0, path.find('/')); }
};

fs::path source_root() {
  const char* root = std::getenv("FERRY_SOURCE_ROOT");
  return root == nullptr ? fs::path() : fs::path(root);
}

const std::vector<std::string> kTopFolders{"distckpt", "converter", "models", "rollout", "serve",
                                           "trainer",  "cli",       "python", "tests"};

// Inputs of tests, one file each.
bool is_data(const std::string& folder) {
  return folder.starts_with("tests/data") || folder.starts_with("tests/fuzz/seeds") ||
         folder.starts_with("tests/fuzz/found");
}

std::vector<fs::path> files_of(const std::string& folder) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::recursive_directory_iterator(source_root() / folder)) {
    if (entry.is_regular_file() && entry.path().extension() != ".pyc")
      found.push_back(entry.path());
  }
  return found;
}

bool is_source(const fs::path& path) {
  const auto extension = path.extension();
  return extension == ".h" || extension == ".cc" || extension == ".cu" || extension == ".cuh";
}

std::vector<fs::path> sources_of(const std::string& folder) {
  auto found = files_of(folder);
  std::erase_if(found, [](const auto& path) { return !is_source(path); });
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

// The folders that each folder may include. Beside cli and tests only python includes cli, for
// reports as JSON.
const std::map<std::string, std::set<std::string>> kAllowed{
    {"distckpt", {"distckpt"}},
    {"converter", {"converter", "rollout/text", "models/spec", "distckpt"}},
    {"models/spec", {"models/spec", "distckpt"}},
    {"models", {"models", "models/spec", "distckpt"}},
    {"rollout", {"rollout", "rollout/text", "models", "models/spec", "distckpt"}},
    {"rollout/text", {"rollout/text", "distckpt"}},
    {"serve", {"serve", "rollout", "rollout/text", "distckpt"}},
    {"serve/bridge", {"serve/bridge", "serve", "rollout", "models", "distckpt"}},
    {"trainer",
     {"trainer", "serve", "rollout", "rollout/text", "models", "models/spec", "converter",
      "distckpt"}},
    {"cli",
     {"cli", "serve", "serve/bridge", "trainer", "rollout", "rollout/text", "models/spec",
      "converter", "distckpt"}},
    {"python", {"python", "cli", "models/spec", "converter", "distckpt"}},
    {"tests",
     {"tests", "cli", "serve", "serve/bridge", "trainer", "rollout", "rollout/text", "models",
      "models/spec", "converter", "distckpt"}},
};

// "models/spec" for "models/spec/alignment.h", "models" for "models/gpt_model.h".
std::string room_of(const std::string& path) {
  std::string room;
  for (const auto& [candidate, uses] : kAllowed) {
    if (path.starts_with(candidate + "/") && candidate.size() > room.size()) room = candidate;
  }
  return room;
}

// The parts of other folders that belong to the program with LibTorch.
bool uses_torch(const std::string& file) {
  return file.starts_with("converter/alignment/") || file.starts_with("cli/torch/");
}

TEST(Layering, EveryIncludeFollowsTheGraphOfRooms) {
  int ours = 0;
  for (const auto& folder : kTopFolders) {
    for (const auto& include : includes_of(folder)) {
      if (!include.quoted) continue;
      ++ours;
      const auto used = room_of(include.path);
      EXPECT_FALSE(used.empty()) << include.where() << ": \"" << include.path
                                 << "\" is not spelled from the root";
      EXPECT_TRUE(kAllowed.at(room_of(include.file)).contains(used) ||
                  (used == "models" && uses_torch(include.file)))
          << include.where() << ": " << room_of(include.file) << " includes " << include.path;
    }
  }
  EXPECT_GT(ours, 1000);
}

// tests/folder_graph.txt: a folder on each line, and those that it uses. tools/folder_graph writes
// it.
std::map<std::string, std::set<std::string>> folder_graph() {
  std::map<std::string, std::set<std::string>> graph;
  for (const auto& line : lines_of(source_root() / "tests/folder_graph.txt")) {
    std::istringstream words(line);
    std::string folder, used;
    words >> folder;
    folder.pop_back();  // the colon
    graph[folder];
    while (words >> used) graph[folder].insert(used);
  }
  return graph;
}

TEST(Layering, EveryIncludeFollowsTheGraphOfFolders) {
  const auto graph = folder_graph();
  std::map<std::string, std::set<std::string>> found;
  for (const auto& folder : kTopFolders) {
    if (folder == "tests") continue;
    for (const auto& path : sources_of(folder)) {
      found[fs::relative(path.parent_path(), source_root()).generic_string()];
    }
    for (const auto& include : includes_of(folder)) {
      if (!include.quoted) continue;
      const auto from = fs::path(include.file).parent_path().generic_string();
      const auto into = fs::path(include.path).parent_path().generic_string();
      if (from == into) continue;
      found[from].insert(into);
      EXPECT_TRUE(graph.contains(from) && graph.at(from).contains(into))
          << include.where() << ": " << from << " includes " << include.path
          << "; if that is wanted: tools/folder_graph --write";
    }
  }
  EXPECT_EQ(found, graph) << "tests/folder_graph.txt lists what is no more";
}

TEST(Layering, TheGraphOfFoldersHasNoCycle) {
  auto graph = folder_graph();
  ASSERT_GT(graph.size(), 40U);
  while (!graph.empty()) {  // takes away the folders that use nothing, again and again
    std::set<std::string> bottom;
    for (const auto& [folder, uses] : graph) {
      if (uses.empty()) bottom.insert(folder);
    }
    std::string rest;
    for (const auto& [folder, uses] : graph) rest += folder + " ";
    ASSERT_FALSE(bottom.empty()) << "a cycle among: " << rest;
    for (const auto& folder : bottom) graph.erase(folder);
    for (auto& [folder, uses] : graph) {
      std::erase_if(uses, [&](const auto& used) { return bottom.contains(used); });
    }
  }
}

constexpr std::size_t kLargestFolder = 25;

TEST(Layering, NoFolderIsACrowd) {
  for (const auto& top : kTopFolders) {
    std::map<std::string, std::size_t> files;
    for (const auto& path : files_of(top)) {
      ++files[fs::relative(path.parent_path(), source_root()).generic_string()];
    }
    EXPECT_FALSE(files.empty()) << top;
    for (const auto& [folder, count] : files) {
      if (is_data(folder)) continue;
      EXPECT_LE(count, kLargestFolder) << folder << " has " << count << " files of its own";
    }
  }
}

TEST(Layering, OurHeadersAreInQuotesAndOthersAreNot) {
  for (const auto& folder : kTopFolders) {
    for (const auto& include : includes_of(folder)) {
      EXPECT_EQ(include.quoted, !room_of(include.path).empty())
          << include.where() << ": " << include.path;
    }
  }
}

TEST(Layering, NoTorchOrPythonHeaderIsIncluded) {
  const std::set<std::string> refused{"torch", "ATen", "c10", "caffe2", "pybind11", "Python.h"};
  for (const char* folder :
       {"distckpt", "converter", "models/spec", "rollout/text", "serve", "trainer/config",
        "trainer/data", "trainer/metrics", "trainer/plan", "trainer/rewards", "cli"}) {
    for (const auto& include : includes_of(folder)) {
      if (uses_torch(include.file)) continue;
      EXPECT_FALSE(refused.contains(include.folder())) << include.where() << ": " << include.path;
    }
  }
}

TEST(Layering, NothingOutsideTestsIncludesATest) {
  for (const char* folder :
       {"distckpt", "converter", "models", "rollout", "serve", "trainer", "cli", "python"}) {
    for (const auto& include : includes_of(folder)) {
      EXPECT_EQ(include.path.find("tests/"), std::string::npos)
          << include.where() << ": " << include.path;
    }
  }
}

constexpr std::size_t kLongestFile = 500;

TEST(Layering, NoFileIsLong) {
  for (const auto& folder : kTopFolders) {
    for (const auto& path : files_of(folder)) {
      if (!is_source(path) && path.extension() != ".py") continue;
      EXPECT_LE(lines_of(path).size(), kLongestFile) << fs::relative(path, source_root());
    }
  }
}

}  // namespace layering_test
}  // namespace ferry
