// Writes a delta of Ferry's own form. docs/formats/delta.md.
#include <algorithm>
#include <utility>

#include "converter/delta/delta_writer.h"
#include "converter/delta/difference_codec.h"
#include "distckpt/base/integers.h"
#include "distckpt/execute/object_pool.h"
#include "distckpt/plan/schedule.h"

namespace ferry::converter {
namespace {

using distckpt::kTaskBytes;

class FerryWriter : public DeltaWriter {
 public:
  FerryWriter(const std::vector<DeltaTensor>& tensors, Spool& spool) : spool_(spool) {
    for (const auto& tensor : tensors) {
      const auto bytes = tensor.shape.product() * size_of(tensor.dtype);
      tensors_.push_back({.name = tensor.name,
                          .element_size = size_of(tensor.dtype),
                          .chunks = std::vector<Extent>(
                              static_cast<std::size_t>(distckpt::ceil_div(bytes, kTaskBytes)))});
    }
  }

  std::int64_t add(const ChangedStretch& stretch) override {
    if (stretch.equal) return 0;
    auto& tensor = tensors_[stretch.tensor];
    const auto chunk = static_cast<std::size_t>(stretch.offset / kTaskBytes);
    const auto difference = codecs_.with([&](DifferenceCodec& codec) {
      return codec.encode(stretch.base, stretch.result, tensor.element_size,
                          chunk_name(tensor.name, chunk));
    });
    tensor.chunks[chunk] = spool_.append(difference.encoded);
    return difference.num_changed;
  }

  std::vector<std::filesystem::path> files() const override {
    return {kDeltaTensors, kDeltaManifest};
  }

  void write(const std::filesystem::path& folder, const DeltaManifest& manifest) override {
    std::vector<SpooledTensor> changed;
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      if (manifest.tensors[i].num_changed == 0) continue;
      SpooledTensor tensor{.name = tensors_[i].name, .pieces = tensors_[i].chunks};
      std::vector<std::uint32_t> sizes;
      for (const auto& chunk : tensor.pieces)
        sizes.push_back(static_cast<std::uint32_t>(chunk.size));
      const auto table = std::as_bytes(std::span(sizes));
      tensor.head.assign(table.begin(), table.end());
      changed.push_back(std::move(tensor));
    }
    write_spooled(folder / kDeltaTensors, changed, {}, spool_);
    distckpt::write_text(folder / kDeltaManifest, write_delta_manifest(manifest));
  }

 private:
  struct Tensor {
    std::string name{};
    std::int64_t element_size = 1;
    std::vector<Extent> chunks{};
  };

  Spool& spool_;
  std::vector<Tensor> tensors_;
  distckpt::ObjectPool<DifferenceCodec> codecs_;
};

}  // namespace

std::unique_ptr<DeltaWriter> make_ferry_writer(const std::vector<DeltaTensor>& tensors,
                                               Spool& spool) {
  return std::make_unique<FerryWriter>(tensors, spool);
}

}  // namespace ferry::converter
