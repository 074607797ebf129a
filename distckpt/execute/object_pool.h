// Objects that hold scratch memory, for threads that come and go.
#pragma once

#include <memory>
#include <mutex>
#include <type_traits>
#include <utility>
#include <vector>

namespace ferry::distckpt {

// Makes an Object for each thread that uses the pool at the same time as others, and keeps them.
template <typename Object>
class ObjectPool {
 public:
  // Runs `use(object)` with an object that no other thread has, and returns its result.
  // Thread-safe. An object whose use throws is not used again.
  template <typename Use>
  auto with(Use&& use) {
    auto object = take();
    if constexpr (std::is_void_v<std::invoke_result_t<Use, Object&>>) {
      use(*object);
      give(std::move(object));
    } else {
      auto result = use(*object);
      give(std::move(object));
      return result;
    }
  }

 private:
  std::unique_ptr<Object> take() {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return std::make_unique<Object>();
    auto object = std::move(idle_.back());
    idle_.pop_back();
    return object;
  }
  void give(std::unique_ptr<Object> object) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(object));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<Object>> idle_;
};

}  // namespace ferry::distckpt
