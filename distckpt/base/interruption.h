// The question whether a thread's work is to be broken off, which is asked by whatever waits for
// others, such as a request to a server. A thread that starts threads hands it on to them.
#pragma once

#include <functional>
#include <utility>

namespace ferry::distckpt {

// Any thread may ask it, several times a second. It does not throw. Empty: never.
using Interruption = std::function<bool()>;

// The question of this thread.
inline Interruption& interruption() {
  thread_local Interruption asked;
  return asked;
}

inline bool is_interrupted() {
  return interruption() && interruption()();
}

// Sets it until the end of a scope. Empty: what cleans up after an interrupt is not interrupted.
class InterruptedBy {
 public:
  explicit InterruptedBy(Interruption asked)
      : before_(std::exchange(interruption(), std::move(asked))) {}
  ~InterruptedBy() { interruption() = std::move(before_); }
  InterruptedBy(const InterruptedBy&) = delete;
  InterruptedBy& operator=(const InterruptedBy&) = delete;

 private:
  Interruption before_;
};

}  // namespace ferry::distckpt
