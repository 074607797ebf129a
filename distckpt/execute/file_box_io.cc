#include "distckpt/execute/file_box_io.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/threads.h"
#include "distckpt/execute/memory_io.h"

namespace ferry::distckpt {
namespace {

// Runs this close together are read with the gaps between them: one read of a few pages costs less
// than two.
struct SpanLimits {
  std::int64_t over_read = 2;  // bytes read per byte wanted
  std::int64_t bytes = std::int64_t{1} << 20;
  // Short runs are read with their gaps up to here: a page is read anyway.
  std::int64_t short_stride = 4096;
};
// A read past the page cache costs as much as a few pages.
constexpr SpanLimits kDirectSpans{.short_stride = 16384};
// A request takes as long as many bytes.
constexpr SpanLimits kRemoteSpans{.over_read = 32, .bytes = std::int64_t{4} << 20};

// The chunks of a matrix lie in bands of eight mebibytes: one for each thread, which may go through
// a tensor of its own.
std::int64_t chunk_cache_bytes() {
  return (std::int64_t{16} << 20) + available_cores() * (std::int64_t{8} << 20);
}

}  // namespace

bool all_zero(std::span<const std::byte> bytes) {
  // Weights differ from zero at once; only true holes are read to the end.
  const auto* data = bytes.data();
  const auto size = bytes.size();
  if (size == 0) return true;
  if (data[0] != std::byte{0}) return false;
  return std::memcmp(data, data + 1, size - 1) == 0;
}

FileSource::FileSource(std::vector<Storage> storages,
                       std::vector<ExpectedChecksum> expected,
                       ReadMode mode,
                       std::shared_ptr<const SourceFiles> files)
    : storages_(std::move(storages)),
      expected_(std::move(expected)),
      mode_(mode),
      known_(std::move(files)),
      chunks_(chunk_cache_bytes()) {
  files_.resize(storages_.size());
  allow_open_files(storages_.size());
  for (const auto& one : expected_) ledger_.add_range(one.range);
  ledger_.seal();
}

const ReadFile& FileSource::file(StorageId storage) {
  const std::lock_guard lock(mutex_);
  auto& file = files_.at(storage);
  if (file == nullptr) {
    const auto* path = file_of(storages_[storage]);
    require(path != nullptr, ErrorKind::kLayout, "{}: not a file", describe(storages_[storage]));
    auto& opened = open_[*path];
    if (!opened) {
      auto found = std::make_unique<ReadFile>(*path, mode_);
      if (known_) known_->require_same(*found);
      opened = std::move(found);
    }
    if (const auto* stored = std::get_if<FileStorage>(&storages_[storage])) {
      require(opened->size() == stored->size, ErrorKind::kIo,
              "{}: has {} bytes, but had {} when its headers were read", path->string(),
              opened->size(), stored->size);
    }
    file = opened.get();
  }
  return *file;
}

DecodedChunk FileSource::decode(const ChunkStorage& chunk, StorageId storage) {
  const auto encoded = DecodedChunk::make(chunk.encoded_size);
  file(storage).read_at(chunk.offset, encoded.bytes());
  const auto stated = stated_checksum(encoded.bytes());
  require(stated == chunk.crc, ErrorKind::kCorrupt,
          "{}: says that its CRC-32 is {:08x}, the file's trailer says {:08x}",
          describe(storages_[storage]), stated, chunk.crc);
  return codecs_.with([&](PlaneCodec& codec) {
    auto decoded = DecodedChunk::make(chunk.decoded_size);
    try {
      codec.decode(encoded.bytes(), chunk.element_size, chunk.name, decoded.bytes());
    } catch (const Error& error) {
      fail(error.kind(), "{}: {}", describe(storages_[storage]), error.what());
    }
    return decoded;
  });
}

void FileSource::read_chunk(const Region& region,
                            std::span<std::byte> packed,
                            std::int64_t size,
                            const std::function<DecodedChunk()>& load) {
  const auto storage = region.at.storage;
  if (region.num_bytes() == 0) return;
  require(region.at.offset >= 0 && fold_runs(region).end() <= size, ErrorKind::kLayout,
          "{}: a box ends behind its {} bytes", describe(storages_[storage]), size);
  const auto decoded = chunks_.get(storage, load);
  copy_strided(packed.data(), packed_strides(region), decoded.data.get() + region.at.offset,
               region.at.strides, region.size, region.element_size);
}

void FileSource::read(const Region& region,
                      std::span<std::byte> packed,
                      std::vector<ChecksumPart>& parts) {
  const auto storage = region.at.storage;
  if (std::holds_alternative<MemoryStorage>(storages_.at(storage))) {
    const auto& memory = memory_of(storages_, region);
    if (packed.empty()) return;
    return copy_strided(packed.data(), packed_strides(region), memory.data + region.at.offset,
                        region.at.strides, region.size, region.element_size);
  }
  if (const auto* chunk = std::get_if<ChunkStorage>(&storages_.at(storage))) {
    return read_chunk(region, packed, chunk->decoded_size, [&] { return decode(*chunk, storage); });
  }
  if (const auto* computed = std::get_if<ComputedStorage>(&storages_.at(storage))) {
    return read_chunk(region, packed, computed->size, [&] {
      auto chunk = DecodedChunk::make(computed->size);
      computed->bytes->compute(computed->index, *this, chunk.bytes(), parts);
      return chunk;
    });
  }
  const auto& file = this->file(storage);
  const auto runs = fold_runs(region);
  const auto run_bytes = static_cast<std::size_t>(runs.run_bytes);
  const auto count = runs.num_runs();
  if (count == 0) return;
  // Runs that lie over each other (a dimension that was expanded has a stride of 0) or in another
  // order, and are together no longer than what is wanted of them: they are read once.
  if (const auto extent = runs.end() - runs.offset;
      count > 1 && extent <= static_cast<std::int64_t>(packed.size())) {
    std::vector<std::byte> all(static_cast<std::size_t>(extent));
    file.read_at(runs.offset, all);
    copy_strided(packed.data(), packed_strides(region), all.data(), region.at.strides, region.size,
                 region.element_size);
    return ledger_.checksum(storage, runs.offset, all, parts);
  }
  if (const auto order = order_of_storage(region.at.strides); !std::ranges::is_sorted(order)) {
    const auto lying = reorder(region, order);
    std::vector<std::byte> all(packed.size());
    read(lying, all, parts);
    return copy_strided(packed.data(), reorder(packed_strides(region), order), all.data(),
                        packed_strides(lying), lying.size, region.element_size);
  }
  const auto limits = file.remote() ? kRemoteSpans : file.direct() ? kDirectSpans : SpanLimits{};
  const bool close_together =
      runs.counts.rank() == 1 && runs.strides[0] > 0 &&
      runs.strides[0] <= std::max(limits.over_read * runs.run_bytes, limits.short_stride) &&
      runs.strides[0] <= limits.bytes;
  if (!close_together) {
    for_each_run(runs, [&](std::int64_t offset, std::int64_t index) {
      const auto into = packed.subspan(static_cast<std::size_t>(index) * run_bytes, run_bytes);
      file.read_at(offset, into);
      ledger_.checksum(storage, offset, into, parts);
    });
    return;
  }
  const auto stride = runs.strides[0];
  const auto per_span = std::max<std::int64_t>(1, limits.bytes / stride);
  std::vector<std::byte> span;
  for (std::int64_t first = 0; first < count; first += per_span) {
    const auto n = std::min(per_span, count - first);
    const auto begin = runs.offset + first * stride;
    span.resize(static_cast<std::size_t>((n - 1) * stride + runs.run_bytes));
    file.read_at(begin, span);
    for (std::int64_t i = 0; i < n; ++i) {
      const auto run = std::span(span).subspan(static_cast<std::size_t>(i * stride), run_bytes);
      std::ranges::copy(run, packed.begin() + (first + i) * runs.run_bytes);
      ledger_.checksum(storage, begin + i * stride, run, parts);
    }
  }
}

void FileSource::require_unchanged() {
  const std::lock_guard lock(mutex_);
  for (const auto& [path, file] : open_) {
    if (file) file->require_unchanged();
  }
  if (known_) known_->require_unchanged();
}

std::int64_t FileSource::verify_checksums() {
  require_unchanged();  // it would explain a wrong checksum
  std::int64_t checked = 0;
  for (std::uint32_t i = 0; i < expected_.size(); ++i) {
    const auto crc = ledger_.combined(i);
    if (!crc) continue;
    const auto& expected = expected_[i];
    require(*crc == expected.crc, ErrorKind::kCorrupt,
            "{}: bytes {} to {} ({}) have CRC-32 {:08x}, the file says {:08x}",
            describe(storages_[expected.range.storage]), expected.range.offset,
            expected.range.offset + expected.range.size, expected.name, *crc, expected.crc);
    ++checked;
  }
  return checked;
}

bool FileSource::reads_directly() {
  const std::lock_guard lock(mutex_);
  return std::ranges::all_of(open_,
                             [](const auto& one) { return !one.second || one.second->direct(); });
}

FileSink::FileSink(const std::vector<Storage>& storages,
                   const std::vector<ChecksumRange>& protect,
                   WriteFile::Mode mode,
                   const std::function<bool(StorageId)>& mine)
    : skip_zeros_(mode == WriteFile::Mode::kCreate) {
  for (const auto& storage : storages) {
    const auto* file = std::get_if<FileStorage>(&storage);
    require(file != nullptr, ErrorKind::kBug, "{}: not a plain file", describe(storage));
    auto& opened = files_.emplace_back();
    if (!mine || mine(static_cast<StorageId>(files_.size() - 1)))
      opened.emplace(file->path, file->size, mode);
  }
  for (const auto& range : protect) ledger_.add_range(range);
  ledger_.seal();
}

const WriteFile& FileSink::file(StorageId storage) const {
  const auto& file = files_.at(storage);
  require(file.has_value(), ErrorKind::kBug, "file {} is written by another process", storage);
  return *file;
}

void FileSink::write(const Region& region,
                     std::span<const std::byte> packed,
                     std::vector<ChecksumPart>& parts) {
  if (const auto order = order_of_storage(region.at.strides); !std::ranges::is_sorted(order)) {
    const auto lying = reorder(region, order);
    std::vector<std::byte> all(packed.size());
    copy_strided(all.data(), packed_strides(lying), packed.data(),
                 reorder(packed_strides(region), order), lying.size, region.element_size);
    return write(lying, all, parts);
  }
  const auto& file = this->file(region.at.storage);
  const auto runs = fold_runs(region);
  const auto run_bytes = static_cast<std::size_t>(runs.run_bytes);
  for_each_run(runs, [&](std::int64_t offset, std::int64_t index) {
    const auto from = packed.subspan(static_cast<std::size_t>(index) * run_bytes, run_bytes);
    if (!skip_zeros_ || !all_zero(from)) file.write_at(offset, from);
    if (written_) written_(region.at.storage, offset, runs.run_bytes);
    ledger_.checksum(region.at.storage, offset, from, parts);
  });
}

void FileSink::write_raw(StorageId storage, std::int64_t offset, std::span<const std::byte> bytes) {
  file(storage).write_at(offset, bytes);
  if (written_) written_(storage, offset, static_cast<std::int64_t>(bytes.size()));
}

void FileSink::discard(StorageId storage, std::int64_t offset, std::int64_t size) const {
  file(storage).discard(offset, size);
}

void FileSink::sync() {
  for (const auto& file : files_) {
    if (file) file->sync();
  }
}

}  // namespace ferry::distckpt
