// Decoded chunks, kept while their neighbours are read: each chunk is read and decoded once by
// however many threads and pieces, as long as those follow each other closely enough for the
// capacity.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>

#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

// Shared, so that a chunk that is being copied from may leave the cache.
struct DecodedChunk {
  std::shared_ptr<std::byte[]> data{};
  std::int64_t size = 0;

  static DecodedChunk make(std::int64_t size);
  std::span<std::byte> bytes() const { return {data.get(), static_cast<std::size_t>(size)}; }
};

// Thread-safe.
class ChunkCache {
 public:
  // `capacity` bytes are kept; chunks in use come on top.
  explicit ChunkCache(std::int64_t capacity) : capacity_(capacity) {}

  // The chunk, by `load` unless it is there. Whoever asks while another thread loads it waits, and
  // gets what that throws.
  DecodedChunk get(StorageId storage, const std::function<DecodedChunk()>& load);

  std::int64_t num_loads();

 private:
  struct Entry {
    std::shared_future<DecodedChunk> chunk{};
    std::int64_t size = 0;  // 0 while it is loaded
    std::list<StorageId>::iterator used{};
  };
  void forget(StorageId storage);  // mutex_ is held

  std::int64_t capacity_;
  std::mutex mutex_;
  std::int64_t size_ = 0;
  std::int64_t num_loads_ = 0;
  std::list<StorageId> used_;  // least recently used first
  std::unordered_map<StorageId, Entry> entries_;
};

}  // namespace ferry::distckpt
