// A subcommand as it is called: what it says and what it returns.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace ferry::cli {

struct Outcome {
  int status = 0;
  std::string out{};
  std::string err{};

  nlohmann::json report() const { return nlohmann::json::parse(out); }
  bool says(const std::string& words) const { return out.find(words) != std::string::npos; }
  bool complains(const std::string& words) const { return err.find(words) != std::string::npos; }
};

inline Outcome run(std::vector<std::string> arguments,
                   const std::function<int(int argc, char** argv)>& program) {
  arguments.insert(arguments.begin(), "ferry");
  std::vector<char*> argv;
  for (auto& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  Outcome outcome;
  outcome.status = program(static_cast<int>(arguments.size()), argv.data());
  outcome.out = testing::internal::GetCapturedStdout();
  outcome.err = testing::internal::GetCapturedStderr();
  return outcome;
}

}  // namespace ferry::cli
