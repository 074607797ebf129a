// The time that has passed since something began.
#pragma once

#include <chrono>

namespace ferry::distckpt {

// Begins where it is made, by a clock that nobody sets.
class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace ferry::distckpt
