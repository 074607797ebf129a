// Boxes in files. One source for every format, whose tensors are plain bytes somewhere in a file or
// in encoded chunks of one, lie in the host's memory, or are computed from others; one sink for
// plain bytes.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "distckpt/execute/checksum_ledger.h"
#include "distckpt/execute/chunk_cache.h"
#include "distckpt/execute/object_pool.h"
#include "distckpt/execute/plane_codec.h"
#include "distckpt/plan/box_io.h"
#include "distckpt/plan/layout.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/source_files.h"

namespace ferry::distckpt {

// A range whose checksum the file states.
struct ExpectedChecksum {
  ChecksumRange range{};
  std::uint32_t crc = 0;
  std::string name{};  // for messages
};

class FileSource : public BoxSource {
 public:
  // Each file has to be as `files` know it, when it is opened and in verify_checksums().
  explicit FileSource(std::vector<Storage> storages,
                      std::vector<ExpectedChecksum> expected = {},
                      ReadMode mode = ReadMode::kCached,
                      std::shared_ptr<const SourceFiles> files = {});

  void read(const Region& region,
            std::span<std::byte> packed,
            std::vector<ChecksumPart>& parts) override;

  void commit(std::span<const ChecksumPart> parts) override { ledger_.commit(parts); }

  std::string name_of(StorageId storage) const override { return describe(storages_.at(storage)); }

  // After everything was read: throws Error(kCorrupt) naming the range whose bytes do not have the
  // checksum that the file states, and Error(kIo) for a file that was changed meanwhile. Ranges
  // that were not read whole are left alone; the number of those that were checked.
  std::int64_t verify_checksums();

  // True if every file that was read was read past the page cache.
  bool reads_directly();

  // The number of times that a chunk was decoded.
  std::int64_t num_decoded() { return chunks_.num_loads(); }

 private:
  const ReadFile& file(StorageId storage);
  void require_unchanged();
  // A part of bytes that are kept for a while, or loaded.
  void read_chunk(const Region& region,
                  std::span<std::byte> packed,
                  std::int64_t size,
                  const std::function<DecodedChunk()>& load);
  DecodedChunk decode(const ChunkStorage& chunk, StorageId storage);

  std::vector<Storage> storages_;
  std::vector<ExpectedChecksum> expected_;
  ReadMode mode_;
  std::shared_ptr<const SourceFiles> known_;
  ChecksumLedger ledger_;
  ChunkCache chunks_;
  ObjectPool<PlaneCodec> codecs_;
  std::mutex mutex_;
  std::map<std::filesystem::path, std::unique_ptr<ReadFile>> open_;
  std::vector<const ReadFile*> files_;  // by storage; opened when first read
};

class FileSink : public BoxSink {
 public:
  // Creates (or reopens) the files of `storages` with their full size: those that `mine` takes, if
  // others write the rest. `protect` are the ranges to checksum.
  FileSink(const std::vector<Storage>& storages,
           const std::vector<ChecksumRange>& protect,
           WriteFile::Mode mode,
           const std::function<bool(StorageId)>& mine = {});

  bool writes(StorageId storage) const { return files_.at(storage).has_value(); }

  // Bytes that are all zero are not written to a new file: holes stay holes.
  void write(const Region& region,
             std::span<const std::byte> packed,
             std::vector<ChecksumPart>& parts) override;
  void commit(std::span<const ChecksumPart> parts) override { ledger_.commit(parts); }

  void write_raw(StorageId storage, std::int64_t offset, std::span<const std::byte> bytes);
  ChecksumLedger& ledger() { return ledger_; }
  void sync();  // fsync of every file

  // Calls `written` after each range that is written from now on, from any thread; null: nobody.
  using Written = std::function<void(StorageId, std::int64_t offset, std::int64_t size)>;
  void observe(Written written) { written_ = std::move(written); }

  // The room of a range that nobody reads any more.
  void discard(StorageId storage, std::int64_t offset, std::int64_t size) const;

 private:
  Written written_;
  bool skip_zeros_;
  const WriteFile& file(StorageId storage) const;
  std::vector<std::optional<WriteFile>> files_;
  ChecksumLedger ledger_;
};

bool all_zero(std::span<const std::byte> bytes);

}  // namespace ferry::distckpt
