#include "distckpt/execute/upload_sink.h"

#include <algorithm>
#include <set>
#include <utility>

#include "distckpt/base/integers.h"
#include "distckpt/base/threads.h"

namespace ferry::distckpt {
namespace {

constexpr std::int64_t kPartBytes = std::int64_t{8} << 20;  // S3 wants 5 MiB or more
constexpr std::int64_t kMaxParts = 9000;                    // and 10,000 at most

std::int64_t part_bytes_of(std::int64_t size) {
  return std::max(kPartBytes, round_up(ceil_div(size, kMaxParts), std::int64_t{1} << 20));
}

// Parts that an interrupted run has left, or that another run sends in vain: the object is there.
void abort_unfinished(const S3Place& place) {
  const auto unfinished = s3_unfinished(place);
  const auto found = unfinished.find(place.key);
  if (found == unfinished.end()) return;
  for (const auto& id : found->second) s3_abort(place, id);
}

std::vector<std::byte> read_part(const ReadFile& file, std::int64_t begin, std::int64_t size) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(size));
  file.read_at(begin, bytes);
  return bytes;
}

}  // namespace

void send_file(const UploadedFile& file) {
  constexpr std::int64_t kSideBySide = 8;
  const ReadFile reader(file.local);
  const auto part_bytes = part_bytes_of(file.size);
  if (file.size <= part_bytes)
    return s3_put(file.place, read_part(reader, 0, file.size), file.claim);
  S3Upload upload(file.place, file.claim);
  try {
    side_by_side(ceil_div(file.size, part_bytes), kSideBySide, [&](std::int64_t part) {
      const auto begin = part * part_bytes;
      upload.put(static_cast<int>(part) + 1,
                 read_part(reader, begin, std::min(part_bytes, file.size - begin)));
    });
    upload.complete(file.size);
  } catch (...) {
    upload.abort();
    throw;
  }
  abort_unfinished(file.place);
}

UploadSink::UploadSink(FileSink& sink,
                       std::vector<UploadedFile> files,
                       bool resume,
                       std::function<void(std::uint32_t)> finish)
    : sink_(sink), resume_(resume), finish_(std::move(finish)) {
  const auto& ranges = sink.ledger().ranges();
  for (std::uint32_t i = 0; i < ranges.size(); ++i)
    ranges_.emplace(std::pair(ranges[i].storage, ranges[i].offset), i);
  finished_.resize(ranges.size());
  std::map<std::string, UnfinishedUploads> unfinished;  // by bucket and folder
  for (auto& what : files) {
    const auto folder = S3Place{.bucket = what.place.bucket,
                                .key = what.place.key.substr(0, what.place.key.rfind('/') + 1)};
    const auto [listed, is_new] = unfinished.try_emplace(folder.address());
    if (is_new) listed->second = s3_unfinished(folder);
    auto earlier = listed->second[what.place.key];
    File file{.part_bytes = part_bytes_of(what.size),
              .reader = std::make_unique<ReadFile>(what.local)};
    if (resume && !earlier.empty()) {
      file.upload = std::make_unique<S3Upload>(what.place, std::move(earlier.back()), what.claim);
      earlier.pop_back();
    } else {
      file.upload = std::make_unique<S3Upload>(what.place, what.claim);
    }
    file.others = std::move(earlier);  // one of them may be alive
    file.sent.resize(static_cast<std::size_t>(ceil_div(what.size, file.part_bytes)));
    file.what = std::move(what);
    files_.push_back(std::move(file));
  }
  sink_.observe([this](StorageId storage, std::int64_t offset, std::int64_t size) {
    note(storage, offset, size);
  });
}

UploadSink::~UploadSink() {
  sink_.observe({});
  if (completed_ || resume_) return;
  for (auto& file : files_)
    if (!file.upload->abort()) break;
}

void UploadSink::write(const Region& region,
                       std::span<const std::byte> packed,
                       std::vector<ChecksumPart>& parts) {
  sink_.write(region, packed, parts);
}

void UploadSink::commit(std::span<const ChecksumPart> parts) {
  sink_.commit(parts);
  std::set<std::uint32_t> touched;
  for (const auto& part : parts) {
    auto at = ranges_.upper_bound({part.storage, part.offset});
    if (at != ranges_.begin()) touched.insert(std::prev(at)->second);
  }
  for (const auto range : touched) {
    if (!sink_.ledger().combined(range)) continue;
    {
      const std::lock_guard lock(mutex_);
      if (finished_[range]) continue;
      finished_[range] = true;
    }
    finish_(range);
  }
  send_ready();
}

// Parts are complete when the ranges that were written cover them.
void UploadSink::note(StorageId storage, std::int64_t offset, std::int64_t size) {
  if (size == 0) return;
  const std::lock_guard lock(mutex_);
  auto& file = files_.at(storage);
  auto begin = offset;
  auto end = offset + size;
  auto at = file.written.upper_bound(begin);
  if (at != file.written.begin() && std::prev(at)->second >= begin) --at;
  while (at != file.written.end() && at->first <= end) {
    begin = std::min(begin, at->first);
    end = std::max(end, at->second);
    at = file.written.erase(at);
  }
  file.written.emplace(begin, end);
  const auto last = (offset + size - 1) / file.part_bytes;
  for (auto part = offset / file.part_bytes; part <= last; ++part) {
    const auto part_end = std::min(file.what.size, (part + 1) * file.part_bytes);
    if (begin > part * file.part_bytes || end < part_end) continue;
    auto sent = file.sent.begin() + part;
    if (*sent) continue;
    *sent = true;
    ready_.push_back({.file = storage, .part = part});
  }
}

void UploadSink::send_ready() {
  while (true) {
    PartId id;
    {
      const std::lock_guard lock(mutex_);
      if (ready_.empty()) return;
      id = ready_.back();
      ready_.pop_back();
    }
    send(id);
  }
}

void UploadSink::send(const PartId& id) {
  auto& file = files_.at(id.file);
  const auto begin = id.part * file.part_bytes;
  const auto size = std::min(file.part_bytes, file.what.size - begin);
  file.upload->put(static_cast<int>(id.part) + 1, read_part(*file.reader, begin, size));
  sink_.discard(id.file, begin, size);
}

void UploadSink::complete() {
  for (StorageId i = 0; i < files_.size(); ++i) {
    for (std::size_t part = 0; part < files_[i].sent.size(); ++part) {
      if (!files_[i].sent[part])
        ready_.push_back({.file = i, .part = static_cast<std::int64_t>(part)});
      files_[i].sent[part] = true;
    }
  }
  send_ready();
  for (auto& file : files_) file.upload->complete(file.what.size);
  completed_ = true;
  for (const auto& file : files_)
    for (const auto& id : file.others) s3_abort(file.what.place, id);
}

std::int64_t UploadSink::kept_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& file : files_) bytes += file.upload->kept_bytes();
  return bytes;
}

}  // namespace ferry::distckpt
