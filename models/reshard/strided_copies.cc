#include "models/reshard/strided_copies.h"

#include <ATen/ops/from_blob.h>

#include <limits>
#include <span>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/plan/box_io.h"
#include "models/kernels/strided_copy_cuda.h"

namespace ferry::models {
namespace {

using distckpt::Dims;

template <typename T>
at::Tensor upload(const std::vector<T>& values, at::ScalarType dtype, at::Device device) {
  const auto count = static_cast<std::int64_t>(values.size() * sizeof(T)) /
                     static_cast<std::int64_t>(c10::elementSize(dtype));
  return at::from_blob(const_cast<T*>(values.data()), {count}, dtype).to(device);
}

// The same copy with dimensions folded that lie alike on both sides, none of size 1.
BoxCopy folded(const BoxCopy& copy) {
  BoxCopy result{.size = {}, .element_size = copy.element_size, .from = copy.from, .to = copy.to};
  result.from.strides = result.to.strides = {};
  for (int d = 0; d < copy.size.rank(); ++d) {
    if (copy.size[d] == 1) continue;
    const auto size = copy.size[d];
    const auto from = copy.from.strides[d];
    const auto to = copy.to.strides[d];
    const int last = result.size.rank() - 1;
    if (last >= 0 && result.from.strides[last] == size * from &&
        result.to.strides[last] == size * to) {
      result.size[last] *= size;
      result.from.strides[last] = from;
      result.to.strides[last] = to;
    } else {
      result.size.push_back(size);
      result.from.strides.push_back(from);
      result.to.strides.push_back(to);
    }
  }
  return result;
}

// The kernel copies runs in up to two dimensions: boxes with more dimensions are cut into several.
void append(BoxCopy copy, std::vector<StridedBox>& boxes) {
  const auto rank = copy.size.rank();
  const bool has_run = rank > 0 && copy.from.strides[rank - 1] == copy.element_size &&
                       copy.to.strides[rank - 1] == copy.element_size;
  const int outer = has_run ? rank - 1 : rank;
  if (outer > 2) {
    auto part = copy;
    part.size[0] = 1;
    for (std::int64_t i = 0; i < copy.size[0]; ++i) {
      append(folded(part), boxes);
      part.from.offset += copy.from.strides[0];
      part.to.offset += copy.to.strides[0];
    }
    return;
  }
  const auto run = copy.element_size * (has_run ? copy.size[rank - 1] : 1);
  const auto bytes = copy.element_size * copy.size.product();
  require(bytes <= std::numeric_limits<std::int32_t>::max(), ErrorKind::kBug,
          "a box of {} bytes is copied at once", bytes);
  StridedBox box{.from_offset = copy.from.offset,
                 .to_offset = copy.to.offset,
                 .from = copy.from.memory,
                 .to = copy.to.memory,
                 .run = static_cast<std::uint32_t>(run),
                 .bytes = static_cast<std::uint32_t>(bytes)};
  for (int d = 0; d < outer; ++d) {
    const int at = d + 2 - outer;  // the inner one is the last
    box.from_strides[at] = copy.from.strides[d];
    box.to_strides[at] = copy.to.strides[d];
    if (at == 1) box.inner = static_cast<std::uint32_t>(copy.size[d]);
  }
  boxes.push_back(box);
}

}  // namespace

Addresses::Addresses(std::vector<std::byte*> addresses, at::Device device)
    : host_(std::move(addresses)) {
  if (device.is_cuda()) device_ = upload(host_, at::kLong, device);
}

StridedCopies::StridedCopies(const std::vector<BoxCopy>& copies, at::Device device) {
  if (!device.is_cuda()) {
    copies_ = copies;
    return;
  }
  if (copies.empty()) return;
  std::vector<StridedBox> boxes;
  for (const auto& copy : copies) append(folded(copy), boxes);
  std::vector<std::int32_t> box_of_tile;
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    boxes[i].first_tile = static_cast<std::int64_t>(box_of_tile.size());
    const auto tiles = distckpt::ceil_div(boxes[i].bytes, kStridedTileBytes);
    box_of_tile.insert(box_of_tile.end(), static_cast<std::size_t>(tiles),
                       static_cast<std::int32_t>(i));
  }
  boxes_ = upload(boxes, at::kByte, device);
  box_of_tile_ = upload(box_of_tile, at::kInt, device);
}

void StridedCopies::run(const Addresses& addresses, std::byte* staging) const {
  if (boxes_.defined()) strided_copy_cuda(boxes_, box_of_tile_, addresses.device(), staging);
  const auto address = [&](const BoxEnd& end) {
    return end.memory < 0 ? staging + end.offset : addresses.of(end);
  };
  for (const auto& copy : copies_) {
    auto* const to = address(copy.to);
    const auto* const from = address(copy.from);
    if (to != from)
      distckpt::copy_strided(to, copy.to.strides, from, copy.from.strides, copy.size,
                             copy.element_size);
  }
}

}  // namespace ferry::models
