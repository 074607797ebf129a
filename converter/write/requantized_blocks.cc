#include "converter/write/requantized_blocks.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <memory_resource>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/base/threads.h"
#include "distckpt/elements/cast.h"
#include "distckpt/elements/quantize.h"
#include "distckpt/execute/task_worker.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::DType;
using distckpt::ModelTensor;
using distckpt::TensorLayout;

constexpr std::int64_t kBandElements = std::int64_t{1} << 20;
constexpr int kScaleBias = 127;

bool is_exponent(DType dtype) {
  return dtype == DType::kU8 || dtype == DType::kF8E8M0;
}

std::vector<float> scale_floats(DType dtype, std::span<const std::byte> stored) {
  std::vector<float> scales(stored.size() / static_cast<std::size_t>(size_of(dtype)));
  const auto into = std::as_writable_bytes(std::span(scales));
  if (is_exponent(dtype)) {
    std::ranges::transform(stored, scales.begin(), [](std::byte exponent) {
      return std::ldexp(1.0F, std::to_integer<int>(exponent) - kScaleBias);
    });
  } else if (dtype == DType::kF32) {
    std::ranges::copy(stored, into.begin());
  } else {
    distckpt::cast(dtype, stored, DType::kF32, into, distckpt::CastRule::kExact);
  }
  return scales;
}

// Writes those that are others.
void store_scales(const std::vector<float>& before,
                  const std::vector<float>& scales,
                  DType dtype,
                  std::span<std::byte> stored) {
  const auto size = static_cast<std::size_t>(size_of(dtype));
  for (std::size_t i = 0; i < scales.size(); ++i) {
    if (scales[i] == before[i]) continue;
    const auto from = std::as_bytes(std::span(&scales[i], 1));
    const auto into = stored.subspan(i * size, size);
    if (is_exponent(dtype)) {
      into[0] = static_cast<std::byte>(std::ilogb(scales[i]) + kScaleBias);
    } else if (dtype == DType::kF32) {
      std::ranges::copy(from, into.begin());
    } else {
      distckpt::cast(DType::kF32, from, dtype, into, distckpt::CastRule::kRound);
    }
  }
}

void require_blocks(const ModelTensor& weight,
                    const ModelTensor& scales,
                    const distckpt::Dims& block) {
  require(
      weight.shape.rank() == 2 && block.rank() == 2 && distckpt::can_dequantize(weight.dtype),
      ErrorKind::kLayout,
      "{}: is {} {}, in the place of a matrix in blocks of FP8, the only quantised weights that "
      "are changed",
      weight.name, short_name(weight.dtype), to_string(weight.shape));
  const distckpt::Shape expected{distckpt::ceil_div(weight.shape[0], block[0]),
                                 distckpt::ceil_div(weight.shape[1], block[1])};
  const bool known = is_exponent(scales.dtype) || scales.dtype == DType::kF32 ||
                     scales.dtype == DType::kBF16 || scales.dtype == DType::kF16;
  require(scales.shape == expected && known, ErrorKind::kLayout,
          "{}: is {} {}, expected {} floating-point numbers or exponents", scales.name,
          short_name(scales.dtype), to_string(scales.shape), to_string(expected));
}

// Links tensors to others of the layout, of the same shapes: `stored` by tensor, or nothing.
void relink(Checkpoint& checkpoint, const std::vector<std::optional<std::uint32_t>>& stored) {
  auto& map = checkpoint.links;
  std::erase_if(map.links, [&](const distckpt::BoxLink& link) {
    if (!stored[link.model]) return false;
    map.left_out.push_back({.stored = link.stored, .box = link.stored_box});
    return true;
  });
  for (std::uint32_t i = 0; i < stored.size(); ++i) {
    if (stored[i])
      map.links.push_back(distckpt::BoxLink::whole(i, *stored[i], checkpoint.tensors[i].shape));
  }
}

}  // namespace

std::shared_ptr<RequantizedBlocks> RequantizedBlocks::replace(
    Checkpoint& checkpoint,
    const std::vector<std::uint32_t>& weights,
    const distckpt::Dims& block,
    Change change) {
  std::unordered_map<std::string_view, std::uint32_t> index;
  for (std::uint32_t i = 0; i < checkpoint.tensors.size(); ++i)
    index.emplace(checkpoint.tensors[i].name, i);
  std::vector<std::optional<std::uint32_t>> at(checkpoint.tensors.size());
  std::vector<ModelTensor> tensors;
  for (const auto weight : weights) {
    const auto& tensor = checkpoint.tensors[weight];
    const auto name = fmt::format("{}{}", tensor.name, kScaleSuffix);
    const auto scales = index.find(name);
    require(scales != index.end(), ErrorKind::kLayout, "{}: {} is not there", tensor.name, name);
    require_blocks(tensor, checkpoint.tensors[scales->second], block);
    for (const auto one : {weight, scales->second}) {
      at[one] = static_cast<std::uint32_t>(tensors.size());
      tensors.push_back(checkpoint.tensors[one]);
    }
  }
  auto links = checkpoint.links;
  distckpt::restrict_links(links, checkpoint.layout, at);
  auto blocks = std::make_shared<RequantizedBlocks>(
      distckpt::plan_read(tensors, {.layout = &checkpoint.layout, .map = &links}), block,
      std::move(change));
  std::vector<std::uint32_t> added;  // by tensor of the plan
  for (std::uint32_t i = 0; i < weights.size(); ++i) {
    for (auto& tensor : blocks->add(2 * i, weights[i], checkpoint.layout))
      added.push_back(checkpoint.layout.add_tensor(std::move(tensor)));
  }
  blocks->counts_.resize(blocks->bands_.size());
  for (auto& one : at) {
    if (one) one = added[*one];
  }
  relink(checkpoint, at);
  return blocks;
}

std::array<TensorLayout, 2> RequantizedBlocks::add(std::uint32_t weight,
                                                   std::uint32_t tensor,
                                                   distckpt::Layout& layout) {
  const auto& of = plan_.tensors[weight].tensor;
  const auto& of_scales = plan_.tensors[weight + 1].tensor;
  const auto& shape = of.shape;
  const auto named = [](const ModelTensor& one) {
    return TensorLayout{
        .name = one.name + " (changed)", .dtype = one.dtype, .shape = one.shape, .shards = {}};
  };
  auto elements = named(of);
  auto scales = named(of_scales);
  const auto step = block_[0] * std::max<std::int64_t>(1, kBandElements / (block_[0] * shape[1]));
  for (std::int64_t row = 0; row < shape[0]; row += step) {
    Band band{.weight = weight,
              .tensor = tensor,
              .box = {.offset = {row, 0}, .size = {std::min(step, shape[0] - row), shape[1]}}};
    const auto blocks = distckpt::scales_of(band.box, block_);
    band.size = band.box.volume() + blocks.volume() * size_of(of_scales.dtype);
    const auto storage = layout.add_storage(
        distckpt::ComputedStorage{.size = band.size,
                                  .bytes = shared_from_this(),
                                  .index = static_cast<std::uint32_t>(bands_.size())});
    elements.shards.push_back(distckpt::packed_shard(band.box, elements.dtype, storage, 0));
    scales.shards.push_back(
        distckpt::packed_shard(blocks, scales.dtype, storage, band.box.volume()));
    bands_.push_back(band);
  }
  return {std::move(elements), std::move(scales)};
}

distckpt::BlockScales RequantizedBlocks::scales_of(const Band& band,
                                                   std::span<const std::byte> stored) const {
  return {.dtype = plan_.tensors[band.weight + 1].tensor.dtype,
          .block = block_,
          .box = distckpt::scales_of(band.box, block_),
          .packed = stored.subspan(static_cast<std::size_t>(band.box.volume()))};
}

std::vector<float> RequantizedBlocks::values(const Band& band,
                                             std::span<const std::byte> stored) const {
  std::vector<float> values(static_cast<std::size_t>(band.box.volume()));
  distckpt::dequantize(band.box, distckpt::Encoding::kE4M3, stored.first(values.size()),
                       scales_of(band, stored), DType::kF32,
                       std::as_writable_bytes(std::span(values)));
  return values;
}

void RequantizedBlocks::compute(std::uint32_t index,
                                distckpt::BoxSource& source,
                                std::span<std::byte> into,
                                std::vector<distckpt::ChecksumPart>& parts) const {
  const auto& band = bands_.at(index);
  const auto count = static_cast<std::size_t>(band.box.volume());
  const auto elements = into.first(count);
  const auto stored_scales = into.subspan(count);
  const distckpt::TaskWorker::Amend unchanged;
  distckpt::TaskWorker worker(plan_, {.staging = 0, .scratch = std::ssize(into), .replica = 0},
                              std::pmr::new_delete_resource(), source, nullptr, unchanged);
  worker.read(band.weight, band.box, elements);
  const auto of_scales = scales_of(band, into);
  worker.read(band.weight + 1, of_scales.box, stored_scales);
  std::ranges::move(worker.record.read, std::back_inserter(parts));

  const auto& name = plan_.tensors[band.weight].tensor.name;
  const auto before_scales = scale_floats(of_scales.dtype, stored_scales);
  require(std::ranges::all_of(before_scales,
                              [](float scale) { return std::isfinite(scale) && scale >= 0; }),
          ErrorKind::kLayout, "{}: a scale of {} is negative or not finite", name,
          to_string(band.box));
  const auto before = values(band, into);
  require(std::ranges::all_of(before, [](float value) { return std::isfinite(value); }),
          ErrorKind::kLayout, "{}: an element of {} is not finite", name, to_string(band.box));
  auto after = before;
  change_(band.tensor, band.box.offset[0] * band.box.size[1], after);
  for (std::size_t i = 0; i < count; ++i) {
    if (after[i] == before[i]) after[i] = before[i];  // its sign is that of a zero, too
  }
  auto scales = before_scales;
  distckpt::requantize_e4m3(after, band.box.size[1], {.rows = block_[0], .columns = block_[1]},
                            of_scales.dtype, scales, elements);
  store_scales(before_scales, scales, of_scales.dtype, stored_scales);

  RequantizedCounts counts{.num_elements = std::ssize(after)};
  const auto now = values(band, into);
  for (std::size_t i = 0; i < count; ++i) {
    if (now[i] != before[i]) {
      ++counts.num_changed;
    } else if (after[i] != before[i]) {
      ++counts.num_vanished;
    }
  }
  for (std::size_t i = 0; i < scales.size(); ++i)
    counts.num_rescaled += scales[i] != before_scales[i] ? 1 : 0;
  const std::lock_guard lock(mutex_);
  counts_[index] = counts;
}

RequantizedCounts RequantizedBlocks::count(distckpt::BoxSource& source,
                                           std::int64_t threads) const {
  std::vector<std::uint32_t> unread;
  for (std::uint32_t i = 0; i < bands_.size(); ++i)
    if (!counts_[i]) unread.push_back(i);
  distckpt::side_by_side(std::ssize(unread), threads, [&](std::int64_t i) {
    const auto band = unread[static_cast<std::size_t>(i)];
    std::vector<std::byte> bytes(static_cast<std::size_t>(bands_[band].size));
    std::vector<distckpt::ChecksumPart> parts;
    compute(band, source, bytes, parts);
  });
  RequantizedCounts sum;
  for (const auto& counts : counts_) {
    sum.num_elements += counts->num_elements;
    sum.num_changed += counts->num_changed;
    sum.num_vanished += counts->num_vanished;
    sum.num_rescaled += counts->num_rescaled;
  }
  return sum;
}

// The elements as they are stored, once here and twice in what reads them, and as floats before the
// change, after it, and once more: the change's own, or what becomes of them.
std::int64_t RequantizedBlocks::thread_memory() const {
  std::int64_t most = 0;
  for (const auto& band : bands_)
    most = std::max(most, 3 * band.size + 3 * band.box.volume() * size_of(DType::kF32));
  return most;
}

}  // namespace ferry::converter
