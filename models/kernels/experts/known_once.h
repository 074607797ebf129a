// Answers that a process finds once for a device and a shape.
#pragma once

#include <map>
#include <mutex>

namespace ferry::models {

// Calls find() at the first question about a key, and answers later ones by its result. Threads
// wait for each other's.
template <typename Key>
class KnownOnce {
 public:
  template <typename Find>
  bool operator()(const Key& key, const Find& find) {
    const std::lock_guard lock(mutex_);
    if (const auto known = known_.find(key); known != known_.end()) return known->second;
    return known_.emplace(key, find()).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<Key, bool> known_;
};

}  // namespace ferry::models
