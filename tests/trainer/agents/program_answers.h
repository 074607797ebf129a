// The answers of a program that may take its time.
#pragma once

#include <chrono>
#include <cstddef>
#include <utility>
#include <vector>

#include "trainer/agents/agent_program.h"

namespace ferry::trainer {

// All answers to `count` questions that are open; fewer after 20 s.
inline std::vector<AgentAnswer> all_answers(AgentProgram& program, std::size_t count) {
  std::vector<AgentAnswer> found;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (found.size() < count && std::chrono::steady_clock::now() < until)
    for (auto& one : program.answers(std::chrono::milliseconds(50)))
      found.push_back(std::move(one));
  return found;
}

}  // namespace ferry::trainer
