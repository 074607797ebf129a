#include "distckpt/base/side_by_side.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "distckpt/base/interruption.h"

namespace ferry::distckpt {

void side_by_side(std::int64_t count,
                  std::int64_t threads,
                  const std::function<void(std::int64_t)>& work) {
  std::atomic<std::int64_t> next = 0;
  std::mutex mutex;
  std::exception_ptr failure;
  {
    std::vector<std::jthread> workers;
    for (std::int64_t i = 0; i < std::min(threads, count); ++i) {
      workers.emplace_back([&, asked = interruption()] {
        const InterruptedBy caller(asked);
        try {
          for (auto at = next++; at < count; at = next++) work(at);
        } catch (...) {
          next = count;
          const std::lock_guard lock(mutex);
          if (!failure) failure = std::current_exception();
        }
      });
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace ferry::distckpt
