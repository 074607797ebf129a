#include "distckpt/formats/torch_save/dtensor.h"

#include <algorithm>
#include <array>

#include "distckpt/base/error.h"
#include "distckpt/formats/torch_save/torch_tensor.h"

namespace ferry::distckpt {
namespace {

using namespace std::string_view_literals;

// Modules moved between releases of torch: torch.distributed._tensor became
// torch.distributed.tensor.
constexpr std::array kMoreGlobals{
    "torch._utils._rebuild_wrapper_subclass"sv,
    "torch.distributed.tensor."sv,
    "torch.distributed._tensor."sv,
    "torch.distributed.device_mesh."sv,
    "torch.distributed._mesh_layout."sv,
    "torch.distributed._shard."sv,
    "torch.distributed.remote_device._remote_device"sv,
    "torch.distributed._remote_device."sv,
    "torch.serialization._get_layout"sv,
    "torch.device"sv,
    "torch.bool"sv,
    "torch.uint8"sv,
    "torch.int8"sv,
    "torch.int16"sv,
    "torch.int32"sv,
    "torch.int64"sv,
    "torch.float16"sv,
    "torch.bfloat16"sv,
    "torch.float32"sv,
    "torch.float64"sv,
    "builtins.getattr"sv,  // spells the name of a class inside a class
    "__builtin__.getattr"sv,
    "builtins.set"sv,
    "__builtin__.set"sv,
};

class Parser {
 public:
  Parser(const TorchFile& file, std::string_view name) : file_(file), name_(name) {}

  RankTensorParts parse(PickleValue value) const {
    if (is_tensor(value)) {
      auto item = file_.tensor(value, name_);
      const auto shape = item.shape;
      return {.shape = shape,
              .parts = {{.box = Box::whole(shape), .item = std::move(item)}},
              .copy = std::nullopt};
    }
    const bool wrapped =
        value.is_object("torch._tensor._rebuild_from_type_v2") && value.object_args().size() == 4 &&
        value.object_args()[0].kind() == PickleKind::kGlobal &&
        value.object_args()[0].global_name() == "torch._utils._rebuild_wrapper_subclass";
    check(wrapped, "is {}, not a tensor", value.describe());
    const auto args = value.object_args();  // function, class, its arguments, state
    const auto type = last_component(args[1].global_name());
    RankTensorParts result{.shape = dims_of(args[2][2], "size"), .parts = {}, .copy = 0};
    if (type == "DTensor") {
      read_dtensor(args[3], result);
    } else {
      check(type == "ShardedTensor", "is a {}, which is not read", args[1].global_name());
      for (const auto shard : args[3][0].elements()) {
        const auto metadata = shard.at("metadata");
        add_part({.offset = dims_of(metadata.at("shard_offsets"), "shard_offsets"),
                  .size = dims_of(metadata.at("shard_sizes"), "shard_sizes")},
                 shard.at("tensor"), result);
      }
    }
    return result;
  }

 private:
  template <typename... Args>
  void check(bool ok, fmt::format_string<Args...> message, Args&&... args) const {
    if (ok) [[likely]]
      return;
    fail(ErrorKind::kCorrupt, "{}: {}: {}", file_.source(), name_,
         fmt::format(message, std::forward<Args>(args)...));
  }

  Dims dims_of(PickleValue value, std::string_view what) const {
    const auto size = as_size(value);
    check(size.has_value(), "{} is {}", what, value.describe());
    return *size;
  }

  void add_part(const Box& box, PickleValue local, RankTensorParts& result) const {
    auto item = file_.tensor(local, name_);
    check(item.shape == box.size && box.inside(result.shape), "holds {} where {} of {} is expected",
          to_string(item.shape), to_string(box), to_string(result.shape));
    if (box.size.product() > 0) result.parts.push_back({.box = box, .item = std::move(item)});
  }

  // A tuple (None, {slot: value}), or the dict alone.
  static PickleValue slots_of(PickleValue state) {
    return state.kind() == PickleKind::kTuple ? state[1] : state;
  }

  void read_dtensor(PickleValue state, RankTensorParts& result) const {
    const auto slots = slots_of(state);
    const auto spec = slots.at("_spec");
    const auto mesh = spec.at("mesh");
    const auto coordinates = dims_of(mesh.at("_coordinate_on_dim"), "the place on the mesh");
    const auto sizes = mesh_sizes(mesh);
    const auto placements = spec.at("placements");
    check(sizes.rank() == coordinates.rank() &&
              placements.size() == static_cast<std::size_t>(sizes.rank()),
          "{} placements, a mesh of {}, a place at {}", placements.size(), to_string(sizes),
          to_string(coordinates));
    Box box = Box::whole(result.shape);
    std::int64_t copy = 0;
    for (int d = 0; d < sizes.rank(); ++d) {
      const auto size = sizes[d];
      const auto at = coordinates[d];
      check(size >= 1 && at >= 0 && at < size, "the place {} on a mesh of {}",
            to_string(coordinates), to_string(sizes));
      const auto placement = placements[static_cast<std::size_t>(d)];
      const auto type = last_component(placement.object_class());
      if (type == "Replicate") {
        copy = copy * size + at;
        continue;
      }
      require(type == "Shard", ErrorKind::kLayout,
              "{}: {}: is placed by {}, only Shard and Replicate are read", file_.source(), name_,
              placement.describe());
      cut(placement.at("dim").as_int(), size, at, box);
    }
    result.copy = copy;
    add_part(box, slots.at("_local_tensor"), result);
  }

  // Cuts as torch.chunk does: parts of the size rounded up, the last ones smaller or empty.
  void cut(std::int64_t dim, std::int64_t parts, std::int64_t index, Box& box) const {
    check(dim >= 0 && dim < box.rank(), "is split along dimension {}", dim);
    const auto d = static_cast<int>(dim);
    const auto whole = box.size[d];
    const auto part = whole / parts + (whole % parts == 0 ? 0 : 1);
    const auto from = part > 0 && index > whole / part ? whole : std::min(whole, index * part);
    box.offset[d] += from;
    box.size[d] = std::min(part, whole - from);
  }

  // Older releases of torch keep a tensor of the mesh's ranks, newer ones its layout.
  Dims mesh_sizes(PickleValue mesh) const {
    if (const auto layout = mesh.find("_layout")) {
      const auto shape = layout->at("shape");
      return shape.kind() == PickleKind::kInt ? Dims{shape.as_int()} : dims_of(shape, "the mesh");
    }
    auto ranks = mesh.find("mesh");
    if (!ranks) ranks = mesh.at("_mesh");
    return file_.tensor(*ranks, name_).shape;
  }

  const TorchFile& file_;
  std::string_view name_;
};

}  // namespace

std::span<const std::string_view> dtensor_globals() {
  static const auto all = [] {
    std::vector<std::string_view> globals(kMoreGlobals.begin(), kMoreGlobals.end());
    globals.insert(globals.end(), tensor_globals().begin(), tensor_globals().end());
    return globals;
  }();
  return all;
}

RankTensorParts parse_rank_parts(const TorchFile& file, PickleValue value, std::string_view name) {
  return Parser(file, name).parse(value);
}

}  // namespace ferry::distckpt
