#include "distckpt/plan/sharded_tensor.h"

#include <algorithm>
#include <charconv>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"

namespace ferry::distckpt {
namespace {

std::string dotted(const Dims& dims) {
  return fmt::format("{}", fmt::join(dims.begin(), dims.end(), "."));
}

std::optional<Dims> parse_dotted(std::string_view text) {
  Dims dims;
  while (dims.rank() < kMaxRank) {
    std::int64_t value = 0;
    const auto* end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc() || value < 0) return std::nullopt;
    dims.push_back(value);
    if (stop == end) return dims;
    if (*stop != '.') return std::nullopt;
    text.remove_prefix(static_cast<std::size_t>(stop - text.data()) + 1);
  }
  return std::nullopt;
}

}  // namespace

bool ShardedTensor::is_main_replica() const {
  return std::ranges::all_of(replica_id, [](int id) { return id == 0; });
}

Box ShardedTensor::box() const {
  Dims size = local_shape;
  for (int i = 0; i < prepend_axis_num; ++i) size.push_front(1);
  return {.offset = global_offset, .size = size};
}

void ShardedTensor::validate() const {
  const auto part = box();
  require(part.rank() == global_shape.rank() && global_offset.rank() == global_shape.rank(),
          ErrorKind::kLayout,
          "{}: shape {} with {} prepended axes does not fit the global shape {}", key,
          to_string(local_shape), prepend_axis_num, to_string(global_shape));
  for (int d = 0; d < part.rank(); ++d) {
    require(part.offset[d] >= 0 && part.size[d] >= 0 && part.end(d) <= global_shape[d],
            ErrorKind::kLayout, "{}: dimension {}: {}:{} leaves the global size {}", key, d,
            part.offset[d], part.end(d), global_shape[d]);
  }
}

Dims LocalShard::byte_strides() const {
  const auto size = size_of(tensor.dtype);
  if (strides.empty()) return distckpt::byte_strides(tensor.local_shape, size);
  auto bytes = strides;
  for (int d = 0; d < bytes.rank(); ++d) bytes[d] *= size;
  return bytes;
}

std::string ShardedObject::unique_key() const {
  return fmt::format("{}/shard_{}_{}", key, dotted(global_offset), dotted(global_shape));
}

std::optional<ShardedObject> parse_unique_key(std::string_view text) {
  constexpr std::string_view kMark = "/shard_";
  const auto mark = text.rfind(kMark);
  if (mark == std::string_view::npos) return std::nullopt;
  const auto numbers = text.substr(mark + kMark.size());
  const auto split = numbers.find('_');
  if (split == std::string_view::npos) return std::nullopt;
  const auto offset = parse_dotted(numbers.substr(0, split));
  const auto shape = parse_dotted(numbers.substr(split + 1));
  if (!offset || !shape || offset->rank() != shape->rank()) return std::nullopt;
  for (int d = 0; d < shape->rank(); ++d) {
    if ((*offset)[d] >= (*shape)[d]) return std::nullopt;
  }
  return ShardedObject{
      .key = std::string(text.substr(0, mark)), .global_shape = *shape, .global_offset = *offset};
}

}  // namespace ferry::distckpt
