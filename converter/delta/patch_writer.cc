// Writes sparse patches: for each tensor that changed NAME.indices (I32, or I64 where that is too
// small) and NAME.values, in the order of the indices. vLLM's CheckpointWeightPatch has these
// fields (vllm/model_executor/model_loader, pull request 50723); its loaders take them from memory,
// and refuse NaN.
#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <utility>

#include "converter/delta/delta_writer.h"
#include "converter/delta/difference_codec.h"
#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/base/json.h"
#include "distckpt/elements/cast.h"
#include "distckpt/plan/schedule.h"

namespace ferry::converter {
namespace {

using distckpt::DType;
using distckpt::kTaskBytes;

class PatchWriter : public DeltaWriter {
 public:
  PatchWriter(const std::vector<DeltaTensor>& tensors, Spool& spool) : spool_(spool) {
    for (const auto& tensor : tensors) {
      const auto count = tensor.shape.product();
      const auto chunks =
          static_cast<std::size_t>(distckpt::ceil_div(count * size_of(tensor.dtype), kTaskBytes));
      tensors_.push_back({.name = tensor.name,
                          .dtype = tensor.dtype,
                          .wide = count > std::numeric_limits<std::int32_t>::max(),
                          .indices = std::vector<Extent>(chunks),
                          .values = std::vector<Extent>(chunks)});
    }
  }

  std::int64_t add(const ChangedStretch& stretch) override {
    if (stretch.equal) return 0;
    auto& tensor = tensors_[stretch.tensor];
    require(distckpt::is_floating_point(tensor.dtype), ErrorKind::kLayout,
            "{}: is {}; vLLM's sparse patches are of floating-point numbers", tensor.name,
            short_name(tensor.dtype));
    const auto size = size_of(tensor.dtype);
    const auto changed = changed_elements(stretch.base, stretch.result, size);
    std::vector<std::byte> values(changed.size() * static_cast<std::size_t>(size));
    for (std::size_t i = 0; i < changed.size(); ++i) {
      const auto* const element = stretch.result.data() + changed[i] * size;
      const auto value = distckpt::element_value(tensor.dtype, element);
      require(value == value, ErrorKind::kLayout,
              "{}: element {} became NaN, which vLLM's sparse patches do not carry", tensor.name,
              stretch.offset / size + changed[i]);
      std::memcpy(values.data() + i * static_cast<std::size_t>(size), element,
                  static_cast<std::size_t>(size));
    }
    const auto chunk = static_cast<std::size_t>(stretch.offset / kTaskBytes);
    const auto first = stretch.offset / size;
    tensor.indices[chunk] =
        tensor.wide ? append<std::int64_t>(changed, first) : append<std::int32_t>(changed, first);
    tensor.values[chunk] = spool_.append(values);
    return static_cast<std::int64_t>(changed.size());
  }

  std::vector<std::filesystem::path> files() const override { return {kPatchFile}; }

  void write(const std::filesystem::path& folder, const DeltaManifest& manifest) override {
    std::vector<SpooledTensor> changed;
    nlohmann::json shapes = nlohmann::json::object();
    for (std::size_t i = 0; i < tensors_.size(); ++i) {
      const auto& tensor = tensors_[i];
      const auto& entry = manifest.tensors[i];
      if (entry.num_changed == 0) continue;
      changed.push_back({.name = tensor.name + ".indices",
                         .dtype = tensor.wide ? DType::kI64 : DType::kI32,
                         .pieces = tensor.indices});
      changed.push_back(
          {.name = tensor.name + ".values", .dtype = tensor.dtype, .pieces = tensor.values});
      shapes[tensor.name] = std::vector<std::int64_t>(entry.shape.begin(), entry.shape.end());
    }
    write_spooled(folder / kPatchFile, changed,
                  {{"base", manifest.base_digest()},
                   {"format", "pt"},
                   {"result", manifest.result_digest()},
                   {"shapes", shapes.dump()}},
                  spool_);
  }

 private:
  struct Tensor {
    std::string name{};
    DType dtype = DType::kBF16;
    bool wide = false;
    std::vector<Extent> indices{};
    std::vector<Extent> values{};
  };

  template <typename Index>
  Extent append(const std::vector<std::int64_t>& changed, std::int64_t first) {
    std::vector<Index> indices;
    indices.reserve(changed.size());
    for (const auto one : changed) indices.push_back(static_cast<Index>(first + one));
    return spool_.append(std::as_bytes(std::span(indices)));
  }

  Spool& spool_;
  std::vector<Tensor> tensors_;
};

}  // namespace

std::unique_ptr<DeltaWriter> make_patch_writer(const std::vector<DeltaTensor>& tensors,
                                               Spool& spool) {
  return std::make_unique<PatchWriter>(tensors, spool);
}

}  // namespace ferry::converter
