#include "distckpt/execute/quantized_bands.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/elements/cast.h"
#include "distckpt/elements/quantize.h"
#include "distckpt/execute/task_worker.h"

namespace ferry::distckpt {
namespace {

// Elements of a band, if its blocks are no longer.
constexpr std::int64_t kBandElements = std::int64_t{1} << 20;

// Some rows of a tensor, which are quantised together: elements, and behind them their scales.
struct Band {
  std::uint32_t tensor = 0;
  Box box{};  // in the tensor's grid
};

class QuantizedBands : public ComputedBytes {
 public:
  QuantizedBands(CopyPlan plan, Encoding encoding, E4M3Scale scale)
      : plan_(std::move(plan)), encoding_(encoding), scale_(scale) {}

  const CopyPlan& plan() const { return plan_; }
  std::uint32_t add(const Band& band) {
    bands_.push_back(band);
    return static_cast<std::uint32_t>(bands_.size() - 1);
  }

  void compute(std::uint32_t index,
               BoxSource& source,
               std::span<std::byte> into,
               std::vector<ChecksumPart>& parts) const override {
    const auto& band = bands_.at(index);
    const auto& tensor = plan_.tensors[band.tensor].tensor;
    const auto values = read(band, source, parts);
    const auto& size = band.box.size;
    const auto refused = encoding_ == Encoding::kE4M3 ? to_e4m3(size[size.rank() - 1], values, into)
                                                      : to_e2m1(size[1], values, into);
    const auto value = values[static_cast<std::size_t>(refused.value_or(0))];
    require(!refused, ErrorKind::kLayout, "{}: an element of {} is {}, which {}", tensor.name,
            to_string(band.box), value,
            std::isfinite(value) ? "no number of E4M3 is by the scale of its block"
                                 : "is not quantised");
  }

 private:
  std::vector<float> read(const Band& band,
                          BoxSource& source,
                          std::vector<ChecksumPart>& parts) const {
    const auto& tensor = plan_.tensors[band.tensor].tensor;
    std::vector<std::byte> stored(
        static_cast<std::size_t>(band.box.volume() * size_of(tensor.dtype)));
    const auto widening = buffer_sizes(plan_).scratch / kTaskBytes;
    const TaskWorker::Amend unchanged;
    TaskWorker worker(plan_, {.staging = 0, .scratch = std::ssize(stored) * widening, .replica = 0},
                      std::pmr::new_delete_resource(), source, nullptr, unchanged);
    worker.read(band.tensor, band.box, stored);
    std::ranges::move(worker.record.read, std::back_inserter(parts));
    std::vector<float> values(static_cast<std::size_t>(band.box.volume()));
    const auto overflow = cast(tensor.dtype, stored, DType::kF32,
                               std::as_writable_bytes(std::span(values)), CastRule::kRound);
    require(!overflow, ErrorKind::kLayout, "{}: an element of {} overflows fp32", tensor.name,
            to_string(band.box));
    return values;
  }

  std::optional<std::int64_t> to_e4m3(std::int64_t columns,
                                      std::span<const float> values,
                                      std::span<std::byte> into) const {
    std::vector<float> scales((into.size() - values.size()) / sizeof(float));
    const auto refused =
        quantize_e4m3(scale_, values, columns, kE4M3Block, into.first(values.size()), scales);
    std::memcpy(into.data() + values.size(), scales.data(), scales.size() * sizeof(float));
    return refused;
  }

  static std::optional<std::int64_t> to_e2m1(std::int64_t columns,
                                             std::span<const float> values,
                                             std::span<std::byte> into) {
    const auto count = static_cast<std::size_t>(columns);
    const auto rows = values.size() / count;
    std::vector<float> turned(values.size());
    for (std::size_t c = 0; c < count; ++c) {
      for (std::size_t r = 0; r < rows; ++r) turned[r * count + c] = values[c * rows + r];
    }
    const auto refused =
        quantize_e2m1(turned, into.first(values.size() / 2), into.subspan(values.size() / 2));
    if (!refused) return std::nullopt;
    const auto at = static_cast<std::size_t>(*refused);
    return static_cast<std::int64_t>(at % count * rows + at / count);
  }

  CopyPlan plan_;
  Encoding encoding_;
  E4M3Scale scale_;
  std::vector<Band> bands_;
};

class LayoutBuilder {
 public:
  LayoutBuilder(CopyPlan plan, Encoding encoding, E4M3Scale scale, Layout& layout)
      : bands_(std::make_shared<QuantizedBands>(std::move(plan), encoding, scale)),
        layout_(layout) {}

  QuantizedTensor add_e4m3(std::uint32_t index) {
    const auto& tensor = tensor_of(index);
    const auto& shape = tensor.shape;
    const auto rank = shape.rank();
    require((rank == 2 || rank == 3) && shape.product() > 0 && tensor.interleaved == 1,
            ErrorKind::kLayout, "{}: is {}, and has no blocks of two dimensions", tensor.name,
            to_string(shape));
    const auto rows = shape[rank - 2];
    const auto columns = shape[rank - 1];
    auto block_shape = shape;
    block_shape[rank - 2] = ceil_div(rows, kE4M3Block);
    block_shape[rank - 1] = ceil_div(columns, kE4M3Block);
    auto elements = named(tensor, "elements", DType::kF8E4M3, shape);
    auto scales = named(tensor, "scales", DType::kF32, block_shape);
    const auto step =
        kE4M3Block * std::max<std::int64_t>(1, kBandElements / (kE4M3Block * columns));
    const auto matrices = rank == 3 ? shape[0] : 1;
    for (std::int64_t matrix = 0; matrix < matrices; ++matrix) {
      for (std::int64_t row = 0; row < rows; row += step) {
        Box box{.offset = {row, 0}, .size = {std::min(step, rows - row), columns}};
        Box blocks{.offset = {row / kE4M3Block, 0},
                   .size = {ceil_div(box.size[0], kE4M3Block), block_shape[rank - 1]}};
        if (rank == 3) {
          for (auto* of_matrix : {&box, &blocks}) {
            of_matrix->offset.push_front(matrix);
            of_matrix->size.push_front(1);
          }
        }
        const auto storage =
            add_storage({index, box}, box.volume() + blocks.volume() * size_of(DType::kF32));
        elements.shards.push_back(packed_shard(box, elements.dtype, storage, 0));
        scales.shards.push_back(packed_shard(blocks, scales.dtype, storage, box.volume()));
      }
    }
    return {layout_.add_tensor(std::move(elements)), layout_.add_tensor(std::move(scales))};
  }

  QuantizedTensor add_e2m1(std::uint32_t index) {
    const auto& tensor = tensor_of(index);
    const auto& shape = tensor.shape;
    require(shape.rank() == 3 && shape.product() > 0 && shape[1] % kE2M1Block == 0,
            ErrorKind::kLayout, "{}: is {}, whose columns are no blocks of {}", tensor.name,
            to_string(shape), kE2M1Block);
    const auto blocks = shape[1] / kE2M1Block;
    constexpr auto kPacks = kE2M1Block / 2;
    auto elements = named(tensor, "blocks", DType::kU8, {shape[0], shape[2], blocks, kPacks});
    auto scales = named(tensor, "scales", DType::kU8, {shape[0], shape[2], blocks});
    const auto turns = tensor.interleaved;
    const auto step = turns * std::max<std::int64_t>(1, kBandElements / (shape[1] * turns));
    for (std::int64_t expert = 0; expert < shape[0]; ++expert) {
      for (std::int64_t row = 0; row < shape[2]; row += step) {
        const auto rows = std::min(step, shape[2] - row);
        Box box{.offset = {expert, 0, row / turns}, .size = {1, shape[1], rows / turns}};
        if (turns > 1) {
          box.offset.push_back(0);
          box.size.push_back(turns);
        }
        const Box of_scales{.offset = {expert, row, 0}, .size = {1, rows, blocks}};
        const Box packs{.offset = {expert, row, 0, 0}, .size = {1, rows, blocks, kPacks}};
        const auto storage = add_storage({index, box}, packs.volume() + of_scales.volume());
        elements.shards.push_back(packed_shard(packs, elements.dtype, storage, 0));
        scales.shards.push_back(packed_shard(of_scales, scales.dtype, storage, packs.volume()));
      }
    }
    return {layout_.add_tensor(std::move(elements)), layout_.add_tensor(std::move(scales))};
  }

 private:
  const ModelTensor& tensor_of(std::uint32_t index) const {
    return bands_->plan().tensors[index].tensor;
  }

  // The source may hold the tensor itself under its name.
  static TensorLayout named(const ModelTensor& tensor,
                            std::string_view what,
                            DType dtype,
                            const Shape& shape) {
    return {.name = fmt::format("{} ({})", tensor.name, what), .dtype = dtype, .shape = shape};
  }

  StorageId add_storage(const Band& band, std::int64_t size) {
    const auto index = bands_->add(band);
    return layout_.add_storage(ComputedStorage{.size = size, .bytes = bands_, .index = index});
  }

  std::shared_ptr<QuantizedBands> bands_;
  Layout& layout_;
};

}  // namespace

std::vector<QuantizedTensor> add_quantized(CopyPlan plan,
                                           Encoding encoding,
                                           E4M3Scale scale,
                                           Layout& layout) {
  const auto count = static_cast<std::uint32_t>(plan.tensors.size());
  LayoutBuilder builder(std::move(plan), encoding, scale, layout);
  std::vector<QuantizedTensor> added;
  for (std::uint32_t i = 0; i < count; ++i)
    added.push_back(encoding == Encoding::kE4M3 ? builder.add_e4m3(i) : builder.add_e2m1(i));
  return added;
}

}  // namespace ferry::distckpt
