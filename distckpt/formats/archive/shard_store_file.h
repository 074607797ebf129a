// One file of an archive while it is written: the HDF5 side of it. Chunks come encoded, and go
// where HDF5 wants them.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/elements/digest.h"
#include "distckpt/formats/archive/hdf5_file.h"
#include "distckpt/formats/archive/shard_store_layout.h"

namespace ferry::distckpt {

// Takes libhdf5's lock by itself.
class ShardStoreFile {
 public:
  // Creates the file `index` of `store`, which must outlive this, with all its datasets.
  ShardStoreFile(const ShardStoreLayout& store, std::uint32_t index);

  void write(std::uint32_t dataset, std::int64_t chunk, std::span<const std::byte> encoded);

  // Adds what the last file holds beyond the others, and the index; closes the file, appends the
  // trailer and syncs it. The trailer's digest.
  Digest finish(const std::map<std::string, std::string>& small_files,
                const std::vector<std::string>& trailers);

 private:
  void create_dataset(const StoredDataset& dataset);
  const Hdf5Handle& open(std::uint32_t dataset);

  const ShardStoreLayout& store_;
  std::uint32_t index_;
  std::string path_;
  Hdf5Handle file_;
  std::map<std::uint32_t, Hdf5Handle> open_;  // some of the datasets
  std::map<std::pair<std::uint32_t, std::int64_t>, std::uint32_t> checksums_;  // of chunks
};

}  // namespace ferry::distckpt
