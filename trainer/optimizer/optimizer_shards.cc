#include "trainer/optimizer/optimizer_shards.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace ferry::trainer {

using distckpt::LocalShard;

std::vector<LocalShard> shards_of_range(const models::Parameters& parameters,
                                        const models::Leaf& leaf,
                                        std::int64_t begin,
                                        const std::string& prefix,
                                        const at::Tensor& data) {
  const auto end = begin + data.numel();
  const auto dtype =
      data.scalar_type() == at::kBFloat16 ? distckpt::DType::kBF16 : distckpt::DType::kF32;
  const auto owner = std::make_shared<const at::Tensor>(data);
  auto* const bytes = static_cast<std::byte*>(data.mutable_data_ptr());
  std::vector<LocalShard> shards;
  std::int64_t first = 0;  // of a parameter's part in the leaf
  for (const auto index : leaf.parameters) {
    const auto& spec = parameters.all()[index].spec;
    for (const auto& part : spec.boxes) {
      const auto size = part.volume();
      const auto from = std::clamp(begin - first, std::int64_t{0}, size);
      const auto to = std::clamp(end - first, std::int64_t{0}, size);
      for (const auto& piece : distckpt::split_flat_range(part.size, from, to)) {
        auto offset = part.offset;
        for (int dim = 0; dim < offset.rank(); ++dim) offset[dim] += piece.box.offset[dim];
        auto replica_id = spec.replica_id;
        replica_id.back() = 0;
        shards.push_back({.tensor = {.key = prefix + spec.key,
                                     .dtype = dtype,
                                     .local_shape = piece.box.size,
                                     .global_shape = spec.global_shape,
                                     .global_offset = offset,
                                     .replica_id = std::move(replica_id)},
                          .data = bytes + (first + piece.begin - begin) * data.element_size(),
                          .strides = distckpt::row_major_strides(piece.box.size),
                          .device = data.is_cuda() ? data.get_device() : -1,
                          .owner = owner});
      }
      first += size;
    }
  }
  return shards;
}

}  // namespace ferry::trainer
