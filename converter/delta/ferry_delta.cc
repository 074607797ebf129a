// Reads a delta of Ferry's own form. docs/formats/delta.md.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

#include "converter/delta/delta.h"
#include "converter/delta/delta_manifest.h"
#include "converter/delta/difference_codec.h"
#include "converter/delta/seen_blocks.h"
#include "converter/open/checkpoint.h"
#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/execute/object_pool.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/plan/schedule.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::kTaskBytes;

// The chunks of a tensor that changed, in the file.
struct StoredChunks {
  std::vector<std::int64_t> begins{};  // and the end of the last
  std::int64_t num_filled = 0;         // in which something changed
};

// Counts of a tensor, over the chunks that went by.
struct AppliedChunks {
  std::int64_t count = 0;
  std::int64_t num_changed = 0;  // elements
};

class FerryDelta : public Delta {
 public:
  explicit FerryDelta(const fs::path& folder) : folder_(folder), tensors_(folder / kDeltaTensors) {
    const auto text = distckpt::read_text(folder / kDeltaManifest);
    manifest_ = parse_delta_manifest(text, (folder / kDeltaManifest).string());
    identity_ = distckpt::digest_block(distckpt::as_bytes(text));
    const auto header = distckpt::read_safetensors_header(folder / kDeltaTensors);
    std::map<std::string_view, const distckpt::SafetensorsEntry*> entries;
    for (const auto& entry : header.entries) entries.emplace(entry.name, &entry);
    summary_ = {.form = DeltaForm::kFerry,
                .path = folder,
                .stored_bytes = tensors_.size() + static_cast<std::int64_t>(text.size()),
                .base_digest = manifest_.base_digest(),
                .result_digest = manifest_.result_digest(),
                .num_tensors = static_cast<std::int64_t>(manifest_.tensors.size()),
                .keep_quantized = manifest_.keep_quantized};
    for (const auto& tensor : manifest_.tensors) {
      const auto bytes = tensor.shape.product() * size_of(tensor.dtype);
      summary_.model_bytes += bytes;
      const auto found = entries.find(tensor.name);
      require((found != entries.end()) == (tensor.num_changed > 0), ErrorKind::kCorrupt,
              "{}: {}: {} elements changed, but the file holds {} of it", tensors_.path().string(),
              tensor.name, tensor.num_changed, found == entries.end() ? "nothing" : "something");
      chunks_.emplace_back();
      if (found == entries.end()) continue;
      chunks_.back() = read_table(*found->second, bytes);
      summary_.tensors.push_back({.name = tensor.name,
                                  .num_changed = tensor.num_changed,
                                  .stored_bytes = found->second->end - found->second->begin});
      entries.erase(found);
    }
    require(entries.empty(), ErrorKind::kCorrupt, "{}: {}: is not in {}", tensors_.path().string(),
            entries.empty() ? "" : entries.begin()->first, kDeltaManifest);
    for (const auto& file : manifest_.files) {
      distckpt::require_plain_filename(file.name, (folder / kDeltaManifest).string());
      summary_.files.push_back(file.name);
      summary_.stored_bytes += file.size;
    }
  }

  void begin(const Checkpoint& base) override {
    const auto& tensors = base.tensors;
    std::map<std::string_view, std::size_t> known;
    for (std::size_t i = 0; i < manifest_.tensors.size(); ++i)
      known.emplace(manifest_.tensors[i].name, i);
    entries_.assign(tensors.size(), kNone);
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto& tensor = tensors[i];
      if (tensor.role != distckpt::Role::kWeight) continue;
      const auto found = known.find(tensor.name);
      require(found != known.end(), ErrorKind::kLayout, "{}: the delta {} does not know it",
              tensor.name, folder_.string());
      const auto& entry = manifest_.tensors[found->second];
      require(entry.dtype == tensor.dtype && entry.shape == tensor.shape, ErrorKind::kLayout,
              "{}: is {} {}, the delta {} changes {} {}", tensor.name, short_name(tensor.dtype),
              to_string(tensor.shape), folder_.string(), short_name(entry.dtype),
              to_string(entry.shape));
      entries_[i] = found->second;
      known.erase(found);
    }
    require(known.empty(), ErrorKind::kLayout, "{}: the delta {} changes it, the base lacks it",
            known.empty() ? "" : known.begin()->first, folder_.string());
    seen_ = SeenBlocks(tensors);
    applied_.assign(manifest_.tensors.size(), {});
  }

  void apply(std::uint32_t tensor, std::int64_t offset, std::span<std::byte> bytes) override {
    const auto index = entries_[tensor];
    if (index == kNone) return;
    const auto& entry = manifest_.tensors[index];
    if (const auto base = seen_.add(tensor, offset, bytes); base && *base != entry.base) {
      throw Error(ErrorKind::kLayout,
                  fmt::format("{}: has the digest {}, the delta {} was made from {}", entry.name,
                              to_string(*base), folder_.string(), to_string(entry.base)),
                  "it is a delta of another base: ferry delta inspect names its digest, ferry "
                  "digest that of a checkpoint");
    }
    const auto& begins = chunks_[index].begins;
    if (begins.empty()) return;
    require(offset % kTaskBytes == 0, ErrorKind::kBug, "a stretch begins at byte {}", offset);
    const auto chunk = static_cast<std::size_t>(offset / kTaskBytes);
    if (begins[chunk] == begins[chunk + 1]) return;
    with_context(
        [&] {
          return fmt::format("reading chunk {} of {} in {}", chunk, entry.name,
                             tensors_.path().string());
        },
        [&] {
          std::vector<std::byte> encoded(
              static_cast<std::size_t>(begins[chunk + 1] - begins[chunk]));
          tensors_.read_at(begins[chunk], encoded);
          const auto num_changed = codecs_.with([&](DifferenceCodec& codec) {
            return codec.apply(encoded, size_of(entry.dtype), chunk_name(entry.name, chunk), bytes);
          });
          const std::lock_guard lock(mutex_);
          ++applied_[index].count;
          applied_[index].num_changed += num_changed;
        });
  }

  void require_applied() const override {
    tensors_.require_unchanged();
    for (const auto index : entries_) {
      if (index == kNone) continue;
      const auto& entry = manifest_.tensors[index];
      const auto& applied = applied_[index];
      if (applied.count < chunks_[index].num_filled) continue;  // an earlier run did the rest
      require(applied.num_changed == entry.num_changed, ErrorKind::kCorrupt,
              "{}: {} elements of {} changed, {} says {}", tensors_.path().string(),
              applied.num_changed, entry.name, kDeltaManifest, entry.num_changed);
    }
  }

  void require_result(const std::vector<distckpt::Digest>& digests) const override {
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      if (entries_[i] == kNone) continue;
      const auto& entry = manifest_.tensors[entries_[i]];
      require(digests[i] == entry.result, ErrorKind::kCorrupt,
              "{}: became {}, the delta {} says {}", entry.name, to_string(digests[i]),
              folder_.string(), to_string(entry.result));
    }
  }

  std::map<std::string, std::string> files() const override {
    std::map<std::string, std::string> contents;
    for (const auto& file : manifest_.files) {
      const auto path = folder_ / kDeltaFiles / file.name;
      auto text = distckpt::read_text(path);
      require(distckpt::digest_block(distckpt::as_bytes(text)) == file.digest, ErrorKind::kCorrupt,
              "{}: is not the file that {} names", path.string(), kDeltaManifest);
      contents.emplace(file.name, std::move(text));
    }
    return contents;
  }

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  // The sizes of a tensor's chunks lie before them.
  StoredChunks read_table(const distckpt::SafetensorsEntry& entry, std::int64_t bytes) const {
    const auto count = static_cast<std::size_t>(distckpt::ceil_div(bytes, kTaskBytes));
    const auto size = entry.end - entry.begin;
    const auto table = static_cast<std::int64_t>(count * sizeof(std::uint32_t));
    require(size >= table, ErrorKind::kCorrupt, "{}: {}: {} bytes, fewer than its {} chunks need",
            tensors_.path().string(), entry.name, size, count);
    std::vector<std::uint32_t> sizes(count);
    tensors_.read_at(entry.begin, std::as_writable_bytes(std::span(sizes)));
    StoredChunks chunks;
    auto at = entry.begin + table;
    for (const auto one : sizes) {
      chunks.begins.push_back(at);
      at += one;
      if (one > 0) ++chunks.num_filled;
    }
    chunks.begins.push_back(at);
    require(at == entry.end, ErrorKind::kCorrupt, "{}: {}: its chunks end at byte {}, expected {}",
            tensors_.path().string(), entry.name, at, entry.end);
    return chunks;
  }

  fs::path folder_;
  distckpt::ReadFile tensors_;
  DeltaManifest manifest_;
  std::vector<StoredChunks> chunks_;  // of the manifest's tensors
  std::vector<std::size_t> entries_;  // of begin()'s tensors, in the manifest
  SeenBlocks seen_{{}};
  distckpt::ObjectPool<DifferenceCodec> codecs_;
  std::vector<AppliedChunks> applied_;  // of the manifest's tensors
  std::mutex mutex_;
};

}  // namespace

std::unique_ptr<Delta> open_ferry_delta(const fs::path& folder) {
  return std::make_unique<FerryDelta>(folder);
}

}  // namespace ferry::converter
