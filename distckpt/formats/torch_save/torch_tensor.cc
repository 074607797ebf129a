#include "distckpt/formats/torch_save/torch_tensor.h"

#include <limits>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace {

// The globals that the pickle of a tensor may name.
constexpr std::string_view kGlobals[] = {
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._tensor._rebuild_from_type_v2",
    "torch.nn.parameter.Parameter",
    "torch.Tensor",
    "torch.Size",
    "torch.BoolStorage",
    "torch.ByteStorage",
    "torch.CharStorage",
    "torch.ShortStorage",
    "torch.IntStorage",
    "torch.LongStorage",
    "torch.HalfStorage",
    "torch.BFloat16Storage",
    "torch.FloatStorage",
    "torch.DoubleStorage",
    "torch.UntypedStorage",
    "torch.storage.UntypedStorage",
    "torch.float8_e4m3fn",
    "torch.float8_e5m2",
    "collections.OrderedDict",
};

bool is_rebuild(std::string_view function) {
  return function == "torch._utils._rebuild_tensor_v2" ||
         function == "torch._utils._rebuild_tensor_v3" ||
         function == "torch._utils._rebuild_parameter";
}

struct Call {
  std::string_view function;
  PickleValue args;
};

// The _rebuild_tensor call inside whatever wraps it: parameters, subclasses of Tensor.
Call rebuild_call(PickleValue value) {
  Call call{value.object_class(), value.object_args()};
  if (call.function == "torch._tensor._rebuild_from_type_v2") {
    call = {call.args[0].global_name(), call.args[2]};
  }
  if (call.function == "torch._utils._rebuild_parameter") {
    call = {call.args[0].object_class(), call.args[0].object_args()};
  }
  return call;
}

// The index of the last element, from the first one. Nothing if it lies beyond `limit`.
std::optional<std::int64_t> last_element(const Shape& shape,
                                         const Dims& strides,
                                         std::int64_t limit) {
  std::int64_t last = 0;
  for (int dim = 0; dim < shape.rank(); ++dim) {
    std::int64_t reach = 0;
    if (strides[dim] < 0 || __builtin_mul_overflow(shape[dim] - 1, strides[dim], &reach) ||
        reach > limit - last) {
      return std::nullopt;
    }
    last += reach;
  }
  return last;
}

}  // namespace

std::string_view last_component(std::string_view name) {
  return name.substr(name.rfind('.') + 1);
}

std::span<const std::string_view> tensor_globals() {
  return kGlobals;
}

bool is_tensor(PickleValue value) {
  if (value.kind() != PickleKind::kObject) return false;
  const auto name = value.object_class();
  if (name == "torch._tensor._rebuild_from_type_v2") {
    const auto inner = value.object_args()[0];
    return inner.kind() == PickleKind::kGlobal && is_rebuild(inner.global_name());
  }
  return is_rebuild(name);
}

TensorItem parse_tensor(PickleValue root, const TorchArchive& archive) {
  const auto check = [&]<typename... Args>(bool ok, fmt::format_string<Args...> message,
                                           Args&&... args) {
    if (ok) [[likely]]
      return;
    fail(ErrorKind::kCorrupt, "{}: the tensor at byte {}: {}", archive.source,
         archive.at("data.pkl").offset, fmt::format(message, std::forward<Args>(args)...));
  };

  const auto [function, args] = rebuild_call(root);
  const bool is_untyped = function == "torch._utils._rebuild_tensor_v3";
  if (!is_untyped && function != "torch._utils._rebuild_tensor_v2") {
    root.fail_expected("tensor");
  }
  // ('storage', class, key, device, number of elements; of bytes if untyped)
  const PickleValue id = args[0].persistent_id();
  check(id[0].as_string() == "storage", "its elements are no storage but {}", id.describe());
  const std::string_view type = (is_untyped ? args[6] : id[1]).global_name();
  const auto dtype = is_untyped ? dtype_from_torch(last_component(type))
                                : dtype_from_storage_class(last_component(type));
  check(dtype.has_value(), "{} is no element type this program reads", type);
  const TorchRecord& storage = archive.at(fmt::format("data/{}", id[2].as_string()));
  const std::int64_t element_bytes = size_of(*dtype);
  const std::int64_t count = storage.size / element_bytes;
  check(storage.size % element_bytes == 0 && id[4].as_int() == (is_untyped ? storage.size : count),
        "a storage of {} {} in {} bytes", id[4].as_int(), type, storage.size);

  const std::int64_t first = args[1].as_int();
  const auto shape = as_size(args[2]);
  const auto strides = as_size(args[3]);
  check(shape.has_value() && strides.has_value() && shape->rank() == strides->rank(),
        "shape {} with strides {}", args[2].describe(), args[3].describe());
  const auto volume = checked_volume(*shape);
  check(volume.has_value() && *volume <= std::numeric_limits<std::int64_t>::max() / element_bytes,
        "shape {}", to_string(*shape));
  check(first >= 0 && first <= count &&
            (*volume == 0 || (first < count && last_element(*shape, *strides, count - first - 1))),
        "shape {} with strides {} from element {} on leaves its storage of {} elements",
        to_string(*shape), to_string(*strides), first, count);

  TensorItem item{.dtype = *dtype,
                  .shape = *shape,
                  .strides = *strides,
                  .contiguous = true,
                  .payload_offset = storage.offset + first * element_bytes,
                  .payload_bytes = *volume * element_bytes,
                  .storage = storage};
  const Dims expected = row_major_strides(*shape);
  for (int dim = 0; dim < shape->rank() && *volume > 0; ++dim) {
    if ((*shape)[dim] != 1 && (*strides)[dim] != expected[dim]) item.contiguous = false;
  }
  return item;
}

Shard shard_of(const TensorItem& item, const Box& box, StorageId storage) {
  auto shard = packed_shard(box, item.dtype, storage, item.payload_offset);
  if (item.contiguous) return shard;
  for (int d = 0; d < box.rank(); ++d) {
    if (item.shape[d] > 1) shard.at.strides[d] = item.strides[d] * size_of(item.dtype);
  }
  return shard;
}

std::optional<ExpectedChecksum> checksum_of(const TensorItem& item,
                                            StorageId storage,
                                            std::string name) {
  const auto& record = item.storage;
  if (!item.contiguous || record.crc32 == 0 || record.offset != item.payload_offset ||
      record.size != item.payload_bytes) {
    return std::nullopt;
  }
  return ExpectedChecksum{
      .range = {.storage = storage, .offset = record.offset, .size = record.size},
      .crc = record.crc32,
      .name = std::move(name)};
}

}  // namespace ferry::distckpt
