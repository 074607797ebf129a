// The families that the documents list are those that the program knows.
#include "converter/families/families.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::converter {
namespace families_test {

std::string document(std::string_view name) {
  const char* root = std::getenv("FERRY_SOURCE_ROOT");
  if (root == nullptr) return {};
  std::ifstream file(std::filesystem::path(root) / name);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The rows of the table behind `heading`, up to the line of value heads; their first cells.
std::string converted_families() {
  const auto text = document("docs/converting.md");
  const auto begin = text.find("\n|---|---|\n", text.find("## Families and dtypes"));
  const auto end = text.find("\n| `ForSequenceClassification`", begin);
  std::string cells;
  const std::regex row("\n\\| ([^|]*) \\|");
  const auto table = text.substr(begin, end - begin);
  for (std::sregex_iterator at(table.begin(), table.end(), row), none; at != none; ++at)
    cells += (cells.empty() ? "" : ", ") + (*at)[1].str();
  return cells;
}

// The cell beside `title` in the table of README, up to a semicolon.
std::string readme_cell(const std::string& title) {
  const auto text = document("README.md");
  const auto begin = text.find("| " + title + " | ");
  if (begin == std::string::npos) return {};
  const auto cell = text.substr(begin + title.size() + 5);
  return cell.substr(0, cell.find_first_of("|;\n"));
}

// "GLM-4 of April 2025 (`glm4`), Qwen3.5 and Qwen3.6 that see": GLM-4, Qwen3.5, Qwen3.6.
std::set<std::string> names(std::string text) {
  text = std::regex_replace(text, std::regex("\\([^)]*\\)| of April 2025| with experts| that see"),
                            "");
  text = std::regex_replace(text, std::regex(" and "), ", ");
  std::set<std::string> found;
  const std::regex name("[^,]*[^, ]");
  for (std::sregex_iterator at(text.begin(), text.end(), name), none; at != none; ++at)
    found.insert(std::regex_replace(at->str(), std::regex("^ +"), ""));
  return found;
}

TEST(Families, AreThoseThatConvertingLists) {
  std::vector<std::string> listed;
  const auto cells = converted_families();
  const std::regex code("`([^`]*)`");
  for (std::sregex_iterator at(cells.begin(), cells.end(), code), none; at != none; ++at)
    listed.push_back((*at)[1].str());
  const auto known = known_families();
  std::vector<std::string> in_code(known.begin(), known.end());
  std::ranges::sort(listed);
  std::ranges::sort(in_code);
  EXPECT_EQ(listed, in_code) << "docs/converting.md lists each model_type once, in backticks";
}

TEST(Families, HaveTheNamesThatReadmeLists) {
  const auto converted = names(converted_families());
  ASSERT_GT(converted.size(), 20);
  EXPECT_EQ(names(readme_cell("families") + ", " + readme_cell("families, converted only")),
            converted);
}

}  // namespace families_test
}  // namespace ferry::converter
