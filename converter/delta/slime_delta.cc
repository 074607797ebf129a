// Reads a delta of slime's form: for each tensor that changed one zstd frame of new XOR old over
// all of its bytes, or of the changed bytes' positions and values, and the XXH3-128 of the new
// bytes. A frame is read from front to back, so stretches of one tensor wait for each other's
// bytes, and the threads share them.
#include <zstd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "converter/delta/delta.h"
#include "converter/delta/slime_version.h"
#include "converter/open/checkpoint.h"
#include "converter/stored/hf_folder.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/elements/arithmetic.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/plan/schedule.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"
#include "distckpt/storage/remote_store.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::json_at;
using distckpt::json_string_at;
using distckpt::kTaskBytes;

constexpr std::string_view kChecksum = "xxh3-128";

enum class SlimeEncoding { kXor, kOverwrite };

// One zstd frame in a file, decoded from front to back.
class FrameReader {
 public:
  FrameReader(const distckpt::ReadFile& file, std::int64_t begin, std::int64_t end)
      : file_(file),
        at_(begin),
        end_(end),
        most_(distckpt::is_remote(file.path()) ? kRemoteRead : kLocalRead),
        stream_(ZSTD_createDStream()) {
    require(stream_ != nullptr, ErrorKind::kIo, "zstd: out of memory");
  }
  ~FrameReader() { ZSTD_freeDStream(stream_); }
  FrameReader(const FrameReader&) = delete;
  FrameReader& operator=(const FrameReader&) = delete;

  // Fills `into`. Throws Error(kCorrupt) if the frame ends before.
  void read(std::span<std::byte> into) {
    const auto got = read_some(into);
    if (got < into.size()) refuse(fmt::format("ends {} bytes early", into.size() - got));
  }

  void require_end() {
    std::byte one{};
    if (read_some({&one, 1}) > 0 || at_ != end_ || input_.pos != input_.size)
      refuse("goes on behind the tensor's end");
  }

 private:
  [[noreturn]] static void refuse(const std::string& what) {
    throw Error(ErrorKind::kCorrupt, "the frame " + what,
                "it is a delta of a base of another dtype, or damaged: slime's form does not tell");
  }

  std::size_t read_some(std::span<std::byte> into) {
    ZSTD_outBuffer output{.dst = into.data(), .size = into.size(), .pos = 0};
    while (output.pos < output.size && !ended_) {
      if (input_.pos == input_.size) {
        const auto size = std::min(end_ - at_, most_);
        require(size > 0, ErrorKind::kCorrupt, "the frame is cut off");
        buffer_.resize(static_cast<std::size_t>(size));
        file_.read_at(at_, buffer_);
        at_ += size;
        input_ = {.src = buffer_.data(), .size = buffer_.size(), .pos = 0};
      }
      const auto left = ZSTD_decompressStream(stream_, &output, &input_);
      require(ZSTD_isError(left) == 0, ErrorKind::kCorrupt, "zstd: {}", ZSTD_getErrorName(left));
      ended_ = left == 0;
    }
    return output.pos;
  }

  static constexpr std::int64_t kLocalRead = std::int64_t{128} << 10;
  static constexpr std::int64_t kRemoteRead = std::int64_t{4} << 20;  // each is a request

  const distckpt::ReadFile& file_;
  std::int64_t at_;
  std::int64_t end_;
  std::int64_t most_;  // at a time
  ZSTD_DStream* stream_;
  std::vector<std::byte> buffer_;
  ZSTD_inBuffer input_{.src = nullptr, .size = 0, .pos = 0};
  bool ended_ = false;
};

// The changed bytes of a tensor: count, positions, values.
struct Overwrite {
  std::vector<std::uint32_t> positions{};
  std::vector<std::byte> values{};
};

Overwrite read_overwrite(FrameReader& frame, std::int64_t num_bytes) {
  std::uint32_t count = 0;
  frame.read(std::as_writable_bytes(std::span(&count, 1)));
  require(count <= num_bytes, ErrorKind::kCorrupt, "{} of {} bytes changed", count, num_bytes);
  Overwrite overwrite;
  overwrite.positions.resize(count);
  overwrite.values.resize(count);
  frame.read(std::as_writable_bytes(std::span(overwrite.positions)));
  frame.read(overwrite.values);
  frame.require_end();
  const auto& positions = overwrite.positions;
  require(std::ranges::adjacent_find(positions, std::greater_equal<>()) == positions.end() &&
              (positions.empty() || positions.back() < num_bytes),
          ErrorKind::kCorrupt, "the positions of changed bytes do not ascend below {}", num_bytes);
  return overwrite;
}

// A tensor on its way: its frame, and what arrived or was decoded before its turn.
class ChangingTensor {
 public:
  ChangingTensor(SlimeEncoding encoding,
                 const distckpt::ReadFile& file,
                 const distckpt::SafetensorsEntry& entry,
                 std::int64_t num_bytes)
      : frame_(std::make_unique<FrameReader>(file, entry.begin, entry.end)), num_bytes_(num_bytes) {
    if (encoding == SlimeEncoding::kXor) return;
    overwrite_ = read_overwrite(*frame_, num_bytes);
    frame_.reset();
  }

  // The digest of all new bytes, once they are all there.
  std::optional<distckpt::Digest> change(std::int64_t offset, std::span<std::byte> bytes) {
    if (frame_) {
      change_by_xor(offset, bytes);
    } else {
      overwrite(offset, bytes);
    }
    return add_to_digest(offset, bytes);
  }

 private:
  void change_by_xor(std::int64_t offset, std::span<std::byte> bytes) {
    while (decoded_ <= offset) {
      const auto size = std::min(kTaskBytes, num_bytes_ - decoded_);
      auto& piece = decoded_ahead_[decoded_];
      piece.resize(static_cast<std::size_t>(size));
      frame_->read(piece);
      decoded_ += size;
    }
    if (decoded_ == num_bytes_) frame_->require_end();
    const auto found = decoded_ahead_.find(offset);
    require(found != decoded_ahead_.end() && found->second.size() == bytes.size(), ErrorKind::kBug,
            "byte {} was asked for twice", offset);
    distckpt::exclusive_or(bytes, found->second);
    decoded_ahead_.erase(found);
  }

  void overwrite(std::int64_t offset, std::span<std::byte> bytes) const {
    const auto& positions = overwrite_.positions;
    const auto end = offset + static_cast<std::int64_t>(bytes.size());
    for (auto at = std::ranges::lower_bound(positions, offset); at != positions.end() && *at < end;
         ++at)
      bytes[static_cast<std::size_t>(*at - offset)] =
          overwrite_.values[static_cast<std::size_t>(at - positions.begin())];
  }

  std::optional<distckpt::Digest> add_to_digest(std::int64_t offset,
                                                std::span<const std::byte> bytes) {
    if (offset != digested_) {
      early_[offset].assign(bytes.begin(), bytes.end());
      return std::nullopt;
    }
    digest_.add(bytes);
    digested_ += static_cast<std::int64_t>(bytes.size());
    for (auto at = early_.find(digested_); at != early_.end(); at = early_.find(digested_)) {
      digest_.add(at->second);
      digested_ += static_cast<std::int64_t>(at->second.size());
      early_.erase(at);
    }
    if (digested_ < num_bytes_) return std::nullopt;
    return digest_.digest();
  }

  std::unique_ptr<FrameReader> frame_;  // of kXor
  Overwrite overwrite_{};
  std::int64_t num_bytes_ = 0;
  std::int64_t decoded_ = 0;
  std::map<std::int64_t, std::vector<std::byte>> decoded_ahead_;
  distckpt::RunningDigest digest_;
  std::int64_t digested_ = 0;
  std::map<std::int64_t, std::vector<std::byte>> early_;
};

class SlimeDelta : public Delta {
 public:
  explicit SlimeDelta(const fs::path& folder) : folder_(folder) {
    const auto source = (folder / distckpt::kSafetensorsIndex).string();
    const auto text = distckpt::read_text(source);
    const auto index = distckpt::parse_json(text, source);
    const auto& metadata = json_at(index, "metadata", source);
    summary_.form = DeltaForm::kSlime;
    summary_.path = folder;
    summary_.version = version_at(metadata, "version", source);
    summary_.base_version = version_at(metadata, "base_version", source);
    summary_.encoding = json_string_at(metadata, "delta_encoding", source);
    require(summary_.encoding == "xor" || summary_.encoding == "overwrite", ErrorKind::kLayout,
            "{}: the encoding {} is unknown", source, summary_.encoding);
    if (summary_.encoding == "overwrite") encoding_ = SlimeEncoding::kOverwrite;
    const auto require_is = [&](std::string_view key, std::string_view expected) {
      const auto found = json_string_at(metadata, key, source);
      require(found == expected, ErrorKind::kLayout, "{}: {}: {} is not handled, only {}", source,
              key, found, expected);
    };
    require_is("compression_format", "zstd");
    require_is("checksum_format", kChecksum);
    distckpt::RunningDigest identity;
    identity.add(distckpt::as_bytes(text));
    const auto names = files_of_index(text, source);
    std::set<std::string> listed;
    for (const auto& [name, file] : json_at(index, "weight_map", source).items())
      listed.insert(name);
    for (const auto& name : names) read_file(name, identity);
    for (const auto& name : listed)
      require(stored_.contains(name), ErrorKind::kCorrupt, "{}: {}: no file holds it", source,
              name);
    require(listed.size() == stored_.size(), ErrorKind::kCorrupt,
            "{}: lists {} tensors, its files hold {}", source, listed.size(), stored_.size());
    identity_ = identity.digest();
    summary_.stored_bytes += static_cast<std::int64_t>(text.size());
  }

  void begin(const Checkpoint& base) override {
    const auto& tensors = base.tensors;
    std::map<std::string_view, std::size_t> known;
    for (std::size_t i = 0; i < tensors.size(); ++i) known.emplace(tensors[i].name, i);
    tensors_.clear();
    tensors_.resize(tensors.size());
    for (auto& [name, stored] : stored_) {
      const auto found = known.find(name);
      if (found == known.end()) {
        require_copy(name, stored, base.map);
        continue;
      }
      auto& tensor = tensors_[found->second];
      tensor.stored = &stored;
      tensor.name = name;
      tensor.num_bytes = tensors[found->second].num_bytes();
      tensor.mutex = std::make_unique<std::mutex>();
    }
  }

  void apply(std::uint32_t index, std::int64_t offset, std::span<std::byte> bytes) override {
    auto& tensor = tensors_[index];
    if (tensor.stored == nullptr) return;
    const auto& stored = *tensor.stored;
    with_context(
        [&] { return fmt::format("changing {} by {}", tensor.name, stored.file->path().string()); },
        [&] {
          const std::lock_guard lock(*tensor.mutex);
          if (!tensor.changing)
            tensor.changing = std::make_unique<ChangingTensor>(encoding_, *stored.file,
                                                               stored.entry, tensor.num_bytes);
          const auto digest = tensor.changing->change(offset, bytes);
          if (!digest) return;
          tensor.changing.reset();
          if (*digest == stored.checksum) return;
          throw Error(ErrorKind::kLayout,
                      fmt::format("{}: became {}, the delta {} says {}", tensor.name,
                                  to_string(*digest), folder_.string(), to_string(stored.checksum)),
                      "it is a delta of another base, or damaged: slime's form does not tell");
        });
  }

  // Counts are not in slime's form; checksums were compared tensor by tensor.
  void require_applied() const override {
    for (const auto& file : files_) file->require_unchanged();
  }

  void require_result(const std::vector<distckpt::Digest>&) const override {}

  bool in_order() const override { return true; }

 private:
  struct StoredTensor {
    const distckpt::ReadFile* file = nullptr;
    distckpt::SafetensorsEntry entry{};
    distckpt::Digest checksum{};
  };
  struct TargetTensor {
    const StoredTensor* stored = nullptr;
    std::string name{};
    std::int64_t num_bytes = 0;
    std::unique_ptr<std::mutex> mutex{};
    std::unique_ptr<ChangingTensor> changing{};
  };

  // Throws unless a name that no tensor has is the second one of a tensor (a tied head) that
  // becomes the same.
  void require_copy(const std::string& name, const StoredTensor& stored, const ModelMap& map) {
    const auto copy = map.copies.find(name);
    require(copy != map.copies.end(), ErrorKind::kLayout,
            "{}: the delta {} changes it, the base lacks it", name, folder_.string());
    const auto& first = map.tensors[copy->second].name;
    const auto found = stored_.find(first);
    require(found != stored_.end() && found->second.checksum == stored.checksum, ErrorKind::kLayout,
            "{}: the delta {} changes it otherwise than {}, which it repeats in the base", name,
            folder_.string(), first);
  }

  static std::int64_t version_at(const nlohmann::json& metadata,
                                 std::string_view key,
                                 const std::string& source) {
    const auto text = json_string_at(metadata, key, source);
    const auto version = parse_slime_version("weight_v" + text);
    require(version.has_value(), ErrorKind::kCorrupt, "{}: {}: \"{}\" is no version", source, key,
            text);
    return *version;
  }

  void read_file(const std::string& name, distckpt::RunningDigest& identity) {
    const auto path = folder_ / name;
    const auto header = distckpt::read_safetensors_header(path);
    identity.add(distckpt::as_bytes(header.prefix));
    files_.push_back(std::make_unique<distckpt::ReadFile>(path));
    summary_.stored_bytes += files_.back()->size();
    for (const auto& entry : header.entries) {
      const auto checksum = header.metadata.find(entry.name);
      require(checksum != header.metadata.end(), ErrorKind::kCorrupt,
              "{}: {}: the file states no checksum of it", path.string(), entry.name);
      const auto digest = distckpt::digest_from_string(checksum->second);
      require(digest.has_value(), ErrorKind::kCorrupt, "{}: {}: \"{}\" is no {}", path.string(),
              entry.name, checksum->second, kChecksum);
      const auto [_, added] = stored_.emplace(
          entry.name,
          StoredTensor{.file = files_.back().get(), .entry = entry, .checksum = *digest});
      require(added, ErrorKind::kCorrupt, "{}: {}: another file holds it, too", path.string(),
              entry.name);
      summary_.tensors.push_back({.name = entry.name, .stored_bytes = entry.end - entry.begin});
    }
  }

  fs::path folder_;
  SlimeEncoding encoding_ = SlimeEncoding::kXor;
  std::vector<std::unique_ptr<distckpt::ReadFile>> files_;
  std::map<std::string, StoredTensor> stored_;
  std::vector<TargetTensor> tensors_;
};

}  // namespace

bool is_slime_delta(const fs::path& folder) {
  const auto path = folder / distckpt::kSafetensorsIndex;
  if (!distckpt::source_exists(path)) return false;
  const auto index = distckpt::parse_json(distckpt::read_text(path), path.string());
  const auto metadata = index.find("metadata");
  return metadata != index.end() && metadata->contains("delta_encoding");
}

std::unique_ptr<Delta> open_slime_delta(const fs::path& folder) {
  return std::make_unique<SlimeDelta>(folder);
}

}  // namespace ferry::converter
