// The trailer behind the HDF5 file in a file of an archive: the place of every chunk, and checksums
// of every byte that is not in a chunk (chunks have their own). A reader needs nothing else, so
// that no byte of a damaged or hostile file is ever handed to libhdf5. docs/formats/hdf5.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "distckpt/elements/digest.h"
#include "distckpt/storage/file_io.h"

namespace ferry::distckpt {

struct ByteRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t size() const { return end - begin; }
};

struct ChunkPlace {
  std::int64_t offset = 0;
  std::uint32_t size = 0;
  std::uint32_t crc = 0;  // that the chunk itself states

  std::int64_t end() const { return offset + size; }
};

struct ShardStoreTrailer {
  std::int64_t begin = 0;            // where HDF5's part of the file ends
  std::vector<ChunkPlace> chunks{};  // dataset after dataset, as the index lists them
  ByteRange index{};                 // of the index: shard_store_index.h
  Digest digest{};                   // of the trailer: a file with other bytes has another
};

// Appends the trailer to a file that HDF5 has closed, and syncs it. `chunks` do not overlap. The
// trailer's digest.
Digest append_trailer(const std::filesystem::path& path,
                      const std::vector<ChunkPlace>& chunks,
                      const ByteRange& index);

// Checks a file against its trailer, all of it but the chunks. Throws Error(kCorrupt) naming the
// bytes that are not as they were written.
ShardStoreTrailer read_trailer(const ReadFile& file);

// True if the file ends as a trailer does. Other programs write files of the same names, too.
bool is_shard_store_file(const std::filesystem::path& path);

}  // namespace ferry::distckpt
