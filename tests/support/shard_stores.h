// Archives of tensors in memory, written and read by way of planner and executor.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "distckpt/formats/archive/shard_store.h"
#include "tests/support/random_boxes.h"

namespace ferry::support {

struct StoredBytes {
  distckpt::ShardStoreTensor tensor{};
  std::vector<std::byte> bytes{};
};

// Tensors of rank 0 to 4, of every size of element, empty ones too.
std::vector<StoredBytes> random_tensors(Random& random, int count, std::int64_t max_size);

struct WriteOptions {
  distckpt::ShardStoreOptions store{};
  std::map<std::string, std::string> small_files{{"hf/config.json", "{}"}, {"hf/empty", ""}};
  int threads = 2;
  std::int64_t stop_after = -1;  // reads: then the run is broken off, and can be resumed
};

// Goes on with what is there if `folder` holds the journal of a run that was broken off. The bytes
// that were copied.
std::int64_t write_shard_store(const std::filesystem::path& folder,
                               const std::vector<StoredBytes>& tensors,
                               const WriteOptions& options);

// Each tensor whole, in the order of the store.
std::vector<std::vector<std::byte>> read_tensors(const distckpt::ShardStore& store,
                                                 int threads = 2);

}  // namespace ferry::support
