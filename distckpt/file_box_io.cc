#include "distckpt/file_box_io.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "distckpt/error.h"

namespace ferry::distckpt {
namespace {

// Runs this close together are read with the gaps between them: one read of a few pages costs less
// than two.
constexpr std::int64_t kMaxOverRead = 2;  // bytes read per byte wanted
constexpr std::int64_t kSpanBytes = std::int64_t{1} << 20;

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
                       ReadMode mode)
    : storages_(std::move(storages)), expected_(std::move(expected)), mode_(mode) {
  files_.resize(storages_.size());
  allow_open_files(storages_.size());
  for (const auto& one : expected_) ledger_.add_range(one.range);
  ledger_.seal();
}

const ReadFile& FileSource::file(StorageId storage) {
  const std::lock_guard lock(mutex_);
  auto& file = files_.at(storage);
  if (!file) {
    const auto* stored = std::get_if<FileStorage>(&storages_[storage]);
    require(stored != nullptr, ErrorKind::kLayout, "{}: not a plain file",
            describe(storages_[storage]));
    file = std::make_unique<ReadFile>(stored->path, mode_);
    require(file->size() == stored->size, ErrorKind::kIo,
            "{}: has {} bytes, but had {} when its headers were read", stored->path.string(),
            file->size(), stored->size);
  }
  return *file;
}

void FileSource::read(const Region& region,
                      std::span<std::byte> packed,
                      std::vector<ChecksumPart>& parts) {
  const auto storage = region.at.storage;
  const auto& file = this->file(storage);
  const auto runs = fold_runs(region);
  const auto run_bytes = static_cast<std::size_t>(runs.run_bytes);
  const auto count = runs.num_runs();
  if (count == 0) return;
  const bool close_together = runs.counts.rank() == 1 &&
                              runs.strides[0] <= kMaxOverRead * runs.run_bytes &&
                              runs.strides[0] <= kSpanBytes;
  if (!close_together) {
    for_each_run(runs, [&](std::int64_t offset, std::int64_t index) {
      const auto into = packed.subspan(static_cast<std::size_t>(index) * run_bytes, run_bytes);
      file.read_at(offset, into);
      ledger_.checksum(storage, offset, into, parts);
    });
    return;
  }
  const auto stride = runs.strides[0];
  const auto per_span = std::max<std::int64_t>(1, kSpanBytes / stride);
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

std::int64_t FileSource::verify_checksums() {
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
  const std::lock_guard lock(mutex_);
  for (const auto& file : files_) {
    if (file) file->require_unchanged();
  }
  return checked;
}

bool FileSource::reads_directly() {
  const std::lock_guard lock(mutex_);
  return std::ranges::all_of(files_, [](const auto& file) { return !file || file->direct(); });
}

FileSink::FileSink(const std::vector<Storage>& storages,
                   std::vector<ChecksumRange> protect,
                   WriteFile::Mode mode)
    : skip_zeros_(mode == WriteFile::Mode::kCreate) {
  for (const auto& storage : storages) {
    const auto* file = std::get_if<FileStorage>(&storage);
    require(file != nullptr, ErrorKind::kBug, "{}: not a plain file", describe(storage));
    files_.emplace_back(file->path, file->size, mode);
  }
  for (const auto& range : protect) ledger_.add_range(range);
  ledger_.seal();
}

void FileSink::write(const Region& region,
                     std::span<const std::byte> packed,
                     std::vector<ChecksumPart>& parts) {
  const auto& file = files_.at(region.at.storage);
  const auto runs = fold_runs(region);
  const auto run_bytes = static_cast<std::size_t>(runs.run_bytes);
  for_each_run(runs, [&](std::int64_t offset, std::int64_t index) {
    const auto from = packed.subspan(static_cast<std::size_t>(index) * run_bytes, run_bytes);
    if (!skip_zeros_ || !all_zero(from)) file.write_at(offset, from);
    ledger_.checksum(region.at.storage, offset, from, parts);
  });
}

void FileSink::write_raw(StorageId storage, std::int64_t offset, std::span<const std::byte> bytes) {
  files_.at(storage).write_at(offset, bytes);
}

void FileSink::sync() {
  for (const auto& file : files_) file.sync();
}

}  // namespace ferry::distckpt
