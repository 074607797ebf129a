// The same work on many things, several at a time.
#pragma once

#include <cstdint>
#include <functional>

namespace ferry::distckpt {

// Calls work(0) to work(count - 1), by up to `threads` threads, in about that order. After one has
// thrown no other is begun, and the first of what was thrown is thrown. The threads have the
// interruption() of the caller's.
void side_by_side(std::int64_t count,
                  std::int64_t threads,
                  const std::function<void(std::int64_t)>& work);

}  // namespace ferry::distckpt
