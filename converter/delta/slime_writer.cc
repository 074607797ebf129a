// Writes a version of slime's folder, as its UpdateWeightFromDiskDelta does with the encoding
// "xor": for each tensor that changed one zstd frame (level 1) of new XOR old over all of its
// bytes, and the XXH3-128 of the new ones.
#include <zstd.h>

#include <algorithm>
#include <map>
#include <utility>

#include "converter/delta/delta_writer.h"
#include "converter/delta/difference_codec.h"
#include "converter/delta/slime_version.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/elements/arithmetic.h"
#include "distckpt/storage/filenames.h"

namespace ferry::converter {
namespace {

constexpr int kZstdLevel = 1;  // slime's

// The file that holds all tensors: slime writes one for each rank.
constexpr std::string_view kOnlyFile = "model-00000-of-00001.safetensors";

// The frame and the checksum of a tensor, made from front to back by one thread at a time.
class TensorFrame {
 public:
  TensorFrame(std::int64_t num_bytes, Spool& spool)
      : spool_(spool), num_bytes_(num_bytes), context_(ZSTD_createCCtx()) {
    require(context_ != nullptr, ErrorKind::kIo, "zstd: out of memory");
    check(ZSTD_CCtx_setParameter(context_, ZSTD_c_compressionLevel, kZstdLevel));
    check(ZSTD_CCtx_setPledgedSrcSize(context_, static_cast<unsigned long long>(num_bytes)));
  }
  ~TensorFrame() { ZSTD_freeCCtx(context_); }
  TensorFrame(const TensorFrame&) = delete;
  TensorFrame& operator=(const TensorFrame&) = delete;

  std::int64_t done() const { return done_; }
  bool complete() const { return done_ == num_bytes_; }

  // The bytes that come next.
  void take(std::span<const std::byte> changes, std::span<const std::byte> result) {
    digest_.add(result);
    done_ += static_cast<std::int64_t>(changes.size());
    const auto mode = complete() ? ZSTD_e_end : ZSTD_e_continue;
    room_.resize(ZSTD_CStreamOutSize());
    ZSTD_inBuffer input{.src = changes.data(), .size = changes.size(), .pos = 0};
    for (bool more = true; more;) {
      ZSTD_outBuffer output{.dst = room_.data(), .size = room_.size(), .pos = 0};
      const auto left = ZSTD_compressStream2(context_, &output, &input, mode);
      check(left);
      if (output.pos > 0) pieces_.push_back(spool_.append(std::span(room_).first(output.pos)));
      more = mode == ZSTD_e_end ? left != 0 : input.pos < input.size;
    }
  }

  std::vector<Extent> take_pieces() { return std::move(pieces_); }
  distckpt::Digest checksum() const { return digest_.digest(); }

 private:
  static void check(std::size_t code) {
    require(ZSTD_isError(code) == 0, ErrorKind::kBug, "zstd: {}", ZSTD_getErrorName(code));
  }

  Spool& spool_;
  std::int64_t num_bytes_;
  ZSTD_CCtx* context_;
  distckpt::RunningDigest digest_;
  std::int64_t done_ = 0;
  std::vector<std::byte> room_;
  std::vector<Extent> pieces_;
};

// Threads compress a tensor each, as slime's do.
class SlimeWriter : public DeltaWriter {
 public:
  SlimeWriter(const std::vector<DeltaTensor>& tensors,
              std::vector<std::pair<std::string, std::uint32_t>> also,
              std::int64_t version,
              Spool& spool)
      : also_(std::move(also)), version_(version), spool_(spool), tensors_(tensors.size()) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      tensors_[i].num_bytes = tensors[i].shape.product() * size_of(tensors[i].dtype);
      tensors_[i].element_size = size_of(tensors[i].dtype);
    }
  }

  std::int64_t add(const ChangedStretch& stretch) override {
    auto& tensor = tensors_[stretch.tensor];
    std::vector<std::byte> changes(stretch.base.begin(), stretch.base.end());
    distckpt::exclusive_or(changes, stretch.result);
    std::int64_t num_changed = 0;
    if (!stretch.equal) {
      num_changed = static_cast<std::int64_t>(
          changed_elements(stretch.base, stretch.result, tensor.element_size).size());
    }
    if (!tensor.frame) tensor.frame = std::make_unique<TensorFrame>(tensor.num_bytes, spool_);
    require(tensor.frame->done() == stretch.offset, ErrorKind::kBug,
            "a stretch begins at byte {}, expected {}", stretch.offset, tensor.frame->done());
    tensor.frame->take(changes, stretch.result);
    if (tensor.frame->complete()) {
      tensor.pieces = tensor.frame->take_pieces();
      tensor.checksum = tensor.frame->checksum();
      tensor.frame.reset();
    }
    return num_changed;
  }

  bool in_order() const override { return true; }

  std::vector<std::filesystem::path> files() const override {
    return {distckpt::kSafetensorsIndex, kOnlyFile};
  }

  void write(const std::filesystem::path& folder, const DeltaManifest& manifest) override {
    std::vector<SpooledTensor> changed;
    std::map<std::string, std::string> checksums;
    nlohmann::json files = nlohmann::json::object();
    const auto add_as = [&](const std::string& name, std::size_t index) {
      if (manifest.tensors[index].num_changed == 0) return;
      const auto& tensor = tensors_[index];
      changed.push_back({.name = name, .pieces = tensor.pieces});
      checksums.emplace(name, to_string(tensor.checksum));
      files[name] = kOnlyFile;
    };
    for (std::size_t i = 0; i < tensors_.size(); ++i) add_as(manifest.tensors[i].name, i);
    for (const auto& [name, index] : also_) add_as(name, index);
    write_spooled(folder / kOnlyFile, changed, checksums, spool_);
    nlohmann::ordered_json index;
    index["metadata"] = {{"version", fmt::format("{:06}", version_)},
                         {"base_version", fmt::format("{:06}", version_ - 1)},
                         {"delta_encoding", "xor"},
                         {"compression_format", "zstd"},
                         {"checksum_format", "xxh3-128"}};
    index.emplace("weight_map", std::move(files));
    distckpt::write_text(folder / distckpt::kSafetensorsIndex, index.dump() + "\n");
  }

 private:
  struct Tensor {
    std::int64_t num_bytes = 0;
    std::int64_t element_size = 1;
    std::unique_ptr<TensorFrame> frame{};
    std::vector<Extent> pieces{};
    distckpt::Digest checksum{};
  };

  std::vector<std::pair<std::string, std::uint32_t>> also_;
  std::int64_t version_;
  Spool& spool_;
  std::vector<Tensor> tensors_;
};

}  // namespace

std::unique_ptr<DeltaWriter> make_slime_writer(
    const std::vector<DeltaTensor>& tensors,
    std::vector<std::pair<std::string, std::uint32_t>> also,
    std::int64_t version,
    Spool& spool) {
  return std::make_unique<SlimeWriter>(tensors, std::move(also), version, spool);
}

}  // namespace ferry::converter
