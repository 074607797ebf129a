#include "distckpt/execute/chunk_cache.h"

namespace ferry::distckpt {

DecodedChunk DecodedChunk::make(std::int64_t size) {
  return {.data = std::make_shared_for_overwrite<std::byte[]>(static_cast<std::size_t>(size)),
          .size = size};
}

DecodedChunk ChunkCache::get(StorageId storage, const std::function<DecodedChunk()>& load) {
  std::promise<DecodedChunk> promise;
  {
    std::unique_lock lock(mutex_);
    const auto found = entries_.find(storage);
    if (found != entries_.end()) {
      used_.splice(used_.end(), used_, found->second.used);
      const auto chunk = found->second.chunk;
      lock.unlock();
      return chunk.get();
    }
    ++num_loads_;
    entries_.emplace(storage, Entry{.chunk = promise.get_future().share(),
                                    .used = used_.insert(used_.end(), storage)});
  }
  try {
    auto chunk = load();
    promise.set_value(chunk);
    const std::lock_guard lock(mutex_);
    auto& entry = entries_.at(storage);
    entry.size = chunk.size;
    size_ += chunk.size;
    for (auto at = used_.begin(); size_ > capacity_ && at != used_.end();) {
      const auto oldest = *at++;
      if (oldest != storage && entries_.at(oldest).size > 0) forget(oldest);
    }
    return chunk;
  } catch (...) {
    promise.set_exception(std::current_exception());
    const std::lock_guard lock(mutex_);
    forget(storage);
    throw;
  }
}

std::int64_t ChunkCache::num_loads() {
  const std::lock_guard lock(mutex_);
  return num_loads_;
}

void ChunkCache::forget(StorageId storage) {
  const auto at = entries_.find(storage);
  size_ -= at->second.size;
  used_.erase(at->second.used);
  entries_.erase(at);
}

}  // namespace ferry::distckpt
