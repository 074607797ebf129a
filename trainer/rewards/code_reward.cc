#include "trainer/rewards/code_reward.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "trainer/rewards/child_process.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;

constexpr std::size_t kCounted = 10;                       // tests, unless all are passed
constexpr std::size_t kMostOutput = std::size_t{4} << 20;  // bytes
constexpr std::string_view kNoSandbox = "2";               // the status of ferry sandbox

// Names that solutions take for granted (prime_code/testing_util.py).
constexpr std::string_view kImports =
    "from string import *\nfrom re import *\nfrom datetime import *\nfrom collections import *\n"
    "from heapq import *\nfrom bisect import *\nfrom copy import *\nfrom math import *\n"
    "from random import *\nfrom statistics import *\nfrom itertools import *\n"
    "from functools import *\nfrom operator import *\nfrom io import *\nfrom sys import *\n"
    "from json import *\nfrom builtins import *\nfrom typing import *\n"
    "import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics\n"
    "import itertools, functools, operator, io, sys, json\nsys.setrecursionlimit(6 * 10**5)\n";

constexpr std::string_view kCall =
    "\nimport json as ferry_json, sys as ferry_sys\n"
    "ferry_asked = [ferry_json.loads(line) for line in ferry_sys.stdin.read().split('\\n')]\n"
    "ferry_said = (Solution().{0} if 'Solution' in globals() else {0})(*ferry_asked)\n"
    "print('\\n' + ferry_json.dumps(ferry_said))\n";

class ProgramFile {
 public:
  explicit ProgramFile(const std::string& text) {
    auto folder = (std::filesystem::temp_directory_path() / "ferry-code-XXXXXX").string();
    require(mkdtemp(folder.data()) != nullptr, ErrorKind::kIo, "{}: cannot be created", folder);
    folder_ = folder;
    distckpt::write_text(path(), text);
  }
  ~ProgramFile() {
    std::error_code error;
    std::filesystem::remove_all(folder_, error);
  }
  ProgramFile(const ProgramFile&) = delete;
  ProgramFile& operator=(const ProgramFile&) = delete;

  std::filesystem::path path() const { return folder_ / "solution.py"; }

 private:
  std::filesystem::path folder_;
};

std::string solution_of(std::string_view text) {
  constexpr std::string_view kBegin = "```python", kEnd = "```";
  const auto begin = text.rfind(kBegin);
  if (begin != text.npos) text.remove_prefix(begin + kBegin.size());
  return std::string(text.substr(0, text.find(kEnd)));
}

// Lines without the spaces around them, and without empty ones at the end.
std::vector<std::string> lines_of(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r\f\v";
  std::vector<std::string> lines;
  while (!text.empty()) {
    auto line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(text.size(), line.size() + 1));
    line.remove_prefix(std::min(line.size(), line.find_first_not_of(kSpaces)));
    lines.emplace_back(line.substr(0, line.find_last_not_of(kSpaces) + 1));
  }
  while (!lines.empty() && lines.back().empty()) lines.pop_back();
  return lines;
}

std::optional<double> number_of(const std::string& text) {
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0') return std::nullopt;
  return value;
}

// Numbers that are near each other are the same (numpy's allclose).
bool same_line(const std::string& said, const std::string& expected) {
  if (said == expected) return true;
  const auto a = number_of(said), b = number_of(expected);
  return a && b && std::abs(*a - *b) <= 1e-8 + 1e-5 * std::abs(*b);
}

std::string text_of(const json& test) {
  require(test.is_string(), ErrorKind::kCorrupt, "ground_truth: a test is text");
  return test.get<std::string>();
}

// Returns all that the program prints, if it ends well and in time.
std::optional<std::string> run_program(const ProgramFile& program,
                                       std::string_view input,
                                       const CodeRewardOptions& options) {
  // The shell ends its last line, and tells its status.
  std::vector<std::string> words{"/bin/sh", "-c", "\"$@\"; status=$?; echo; echo $status", "sh"};
  words.insert(words.end(), options.sandbox.begin(), options.sandbox.end());
  words.insert(words.end(), {"python3", program.path().string()});
  ChildProcess process(words);
  const auto until = std::chrono::steady_clock::now() + options.timeout;
  std::string said;
  while (!process.ended()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    if (left.count() <= 0 || said.size() > kMostOutput) return std::nullopt;
    if (input.empty()) process.close_input();
    try {
      if (const auto line = process.exchange(input, left)) said += *line + "\n";
    } catch (const LineTooLong&) {
      return std::nullopt;
    }
  }
  std::string_view none;
  while (const auto line = process.exchange(none, std::chrono::milliseconds(0)))
    said += *line + "\n";
  const auto lines = lines_of(said);
  const auto status = lines.empty() ? "" : lines.back();
  // The program's own status, or that of a sandbox which could not be made.
  if (status == kNoSandbox && said.find_first_not_of('\n') == said.rfind(status))
    require_sandbox(options.sandbox);
  if (status != "0") return std::nullopt;
  return said.substr(0, said.rfind("\n0\n"));
}

bool passes(const std::optional<std::string>& said, const json& expected, bool returns) {
  if (!said) return false;
  const auto lines = lines_of(*said);
  if (!returns) return std::ranges::equal(lines, lines_of(text_of(expected)), same_line);
  const auto value = distckpt::json_or_discarded(lines.empty() ? "" : lines.back());
  const auto wanted = distckpt::json_or_discarded(text_of(expected));
  require(!wanted.is_discarded(), ErrorKind::kCorrupt, "ground_truth: what {} returns is JSON",
          "fn_name");
  return value == wanted || (wanted.is_array() && !wanted.empty() && value == wanted.front());
}

}  // namespace

void require_sandbox(const std::vector<std::string>& sandbox) {
  constexpr std::string_view kMade = "made";
  auto words = sandbox;
  words.insert(words.end(), {"echo", std::string(kMade)});
  ChildProcess process(words);
  std::string said;
  while (!process.ended() && said.empty()) {
    std::string_view none;
    if (const auto line = process.exchange(none, std::chrono::milliseconds(1000))) said = *line;
  }
  require(said == kMade, ErrorKind::kUsage,
          "no sandbox can be made here, in which code could be tested");
}

RewardScore code_reward(std::string_view solution_str,
                        std::string_view ground_truth,
                        const CodeRewardOptions& options) {
  const auto tests = distckpt::json_or_discarded(ground_truth);
  require(tests.is_object() && tests.contains("inputs") && tests["inputs"].is_array() &&
              tests.contains("outputs") && tests["outputs"].is_array() &&
              tests["inputs"].size() == tests["outputs"].size() && !tests["inputs"].empty(),
          ErrorKind::kCorrupt,
          "ground_truth: has no tests, {{\"inputs\": [...], \"outputs\": "
          "[...]}}");
  auto text = std::string(kImports) + solution_of(solution_str);
  const bool calls = tests.contains("fn_name") && tests["fn_name"].is_string();
  if (calls) {
    const auto name = tests["fn_name"].get<std::string>();
    require(!name.empty() &&
                std::ranges::all_of(
                    name, [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; }),
            ErrorKind::kCorrupt, "ground_truth: fn_name is no name of Python: {}", name);
    text += fmt::format(kCall, name);
  }
  const ProgramFile program(text);
  const auto count = tests["inputs"].size();
  std::size_t passed = 0, run = 0;
  for (; run < count && (run < kCounted || passed == run); ++run)
    if (passes(run_program(program, text_of(tests["inputs"][run]), options), tests["outputs"][run],
               calls))
      ++passed;
  const bool all = passed == count;
  const auto counted = std::min(run, kCounted);
  return {
      .score =
          all ? 1 : static_cast<double>(std::min(passed, counted)) / static_cast<double>(counted),
      .numbers = {{"acc", all ? 1 : 0}, {"tests", static_cast<double>(run)}}};
}

}  // namespace ferry::trainer
