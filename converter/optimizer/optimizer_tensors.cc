#include "converter/optimizer/optimizer_tensors.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <utility>

#include "converter/families/megatron_links.h"
#include "converter/optimizer/optimizer_buckets.h"
#include "converter/optimizer/optimizer_records.h"
#include "converter/stored/stored.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::DType;
using distckpt::Shape;
using distckpt::Shard;
using distckpt::TensorLayout;

constexpr std::array<std::string_view, 3> kKinds{"exp_avg", "exp_avg_sq", "param"};

// Masters are "param" in the forms of today, "fp32_param" in older ones.
std::string_view canonical_kind(std::string_view kind) {
  return kind == "fp32_param" ? "param" : kind;
}

// Throws unless `kind` is a state of Adam.
void require_known_kind(std::string_view kind, std::string_view key) {
  if (std::ranges::find(kKinds, kind) != kKinds.end()) return;
  throw Error(
      ErrorKind::kLayout,
      fmt::format("{}: the optimizer keeps {}; exp_avg, exp_avg_sq and param are known", key, kind),
      "--no-save-optim converts the model alone");
}

// Elements [begin, end) of the row-major elements of a box, which lie packed at `offset`.
struct FlatRun {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  distckpt::StorageId storage = 0;
  std::int64_t offset = 0;
};

// The part of `runs` that is [begin, end), as shards of `box`, of which `begin` is the first
// element.
void add_shards(const Box& box,
                std::int64_t begin,
                std::span<const FlatRun> runs,
                std::vector<Shard>& shards) {
  const auto end = begin + box.volume();
  auto run = std::ranges::upper_bound(runs, begin, {}, &FlatRun::begin);
  if (run != runs.begin()) --run;
  for (; run != runs.end() && run->begin < end; ++run) {
    const auto from = std::max(begin, run->begin);
    const auto to = std::min(end, run->end);
    if (from >= to) continue;
    for (const auto& piece : distckpt::split_flat_range(box.size, from - begin, to - begin)) {
      Box part = piece.box;
      for (int d = 0; d < part.rank(); ++d) part.offset[d] += box.offset[d];
      shards.push_back(distckpt::packed_shard(
          part, DType::kF32, run->storage,
          run->offset + (begin + piece.begin - run->begin) * size_of(DType::kF32)));
    }
  }
}

// Every tensor of the optimizer as it lies in the files, and where it goes.
class Adder {
 public:
  Adder(const distckpt::TorchDistCheckpoint& checkpoint,
        const ModelMap& map,
        const models::ParallelConfig& parallel,
        distckpt::Layout& layout,
        distckpt::TensorMap& links,
        std::vector<distckpt::ModelTensor>& tensors,
        std::vector<distckpt::ExpectedChecksum>& checksums)
      : checkpoint_(checkpoint),
        map_(map),
        parallel_(parallel),
        layout_(layout),
        links_(links),
        tensors_(tensors),
        checksums_(checksums) {}

  OptimizerTensors add(std::string_view form) {
    result_.form = form;
    if (form == "fully_reshardable" || form == "fully_sharded_model_space") {
      add_model_space();
    } else if (form == "dp_reshardable") {
      add_buckets();
    } else if (form == "dp_zero_gather_scatter") {
      add_gathered();
    } else {
      throw Error(ErrorKind::kLayout,
                  form.empty()
                      ? "the state of an optimizer that is not a distributed one is not "
                        "converted"
                      : fmt::format("the optimizer's state is {}, which is not converted", form),
                  "fully_reshardable, dp_reshardable, fully_sharded_model_space and "
                  "dp_zero_gather_scatter are; --no-save-optim converts the model alone");
    }
    for (auto& [key, tensor] : states_) {
      require_known_kind(tensor.kind, key);
      kinds_.insert(tensor.kind);
      layout_.add_tensor(std::move(tensor.layout));
    }
    result_.kinds.assign(kinds_.begin(), kinds_.end());
    link();
    return std::move(result_);
  }

 private:
  struct State {
    std::string kind{};
    TensorLayout layout{};
  };

  TensorLayout& state_of(std::string_view kind, std::string_view key, const Shape& shape) {
    auto name = fmt::format("{}{}.{}", kStatePrefix, kind, key);
    auto& state = states_[name];
    state.kind = kind;
    if (state.layout.name.empty())
      state.layout = {.name = std::move(name), .dtype = DType::kF32, .shape = shape, .shards = {}};
    return state.layout;
  }

  // Another tensor parallel rank's or another stage's copy of a state, as whole as the state is.
  TensorLayout& copy_of(const TensorLayout& state, int replica) {
    auto name = fmt::format("{} (copy {})", state.name, replica);
    auto& copy = copies_[name];
    if (copy.of.empty()) {
      copy = {.tensor = TensorLayout{.name = std::move(name),
                                     .dtype = DType::kF32,
                                     .shape = state.shape,
                                     .shards = {}},
              .of = state.name};
    }
    return copy.tensor;
  }

  // optimizer.state.<kind>.<key of the model>
  void add_model_space() {
    std::vector<const distckpt::TorchDistTensor*> wanted;
    for (const auto& tensor : checkpoint_.tensors) {
      auto key = models::strip_wrappers(tensor.key);
      strip_chain(key);
      if (key.starts_with(kStatePrefix)) wanted.push_back(&tensor);
    }
    auto resolved = distckpt::resolve_layout(checkpoint_, wanted);
    take_checksums(resolved.checksums);
    std::map<std::string, Shape, std::less<>> shapes;  // of the model's tensors
    for (const auto& tensor : layout_.tensors())
      shapes.emplace(models::strip_wrappers(tensor.name), tensor.shape);
    if (map_.trains_tower) {
      for (const auto& tensor : make_vision_map(map_.config).megatron)
        shapes.emplace(tensor.key, tensor.shape);
    }
    for (const auto& tensor : resolved.layout.tensors()) {
      auto key = models::strip_wrappers(tensor.name);
      strip_chain(key);
      key.remove_prefix(kStatePrefix.size());
      const auto dot = key.find('.');
      require(dot != std::string_view::npos && tensor.dtype == DType::kF32, ErrorKind::kLayout,
              "{}: is of dtype {}, fp32 is expected", tensor.name, short_name(tensor.dtype));
      const auto kind = canonical_kind(key.substr(0, dot));
      const auto of = models::strip_wrappers(key.substr(dot + 1));
      const auto model = shapes.find(of);
      require(model != shapes.end(), ErrorKind::kLayout, "{}: the model has no {}", tensor.name,
              of);
      const auto& shape = model->second;
      auto& state = state_of(kind, of, shape);
      require(state.shards.empty(), ErrorKind::kLayout, "{}: is there twice", tensor.name);
      if (result_.form == "fully_reshardable") {
        state.shape = tensor.shape;
        state.shards = tensor.shards;
      } else {
        unflatten(tensor, state);
      }
    }
  }

  // A tensor of shape [g0, ..., gn] in blocks of [l0, ..., ln] is stored as
  // [g0/l0, ..., gn/ln, l0*...*ln]: of each block the flattened elements.
  static void unflatten(const TensorLayout& stored, TensorLayout& state) {
    const int rank = state.shape.rank();
    Shape block = Shape::filled(rank, 1);
    bool fits = stored.shape.rank() == rank + 1;
    for (int d = 0; fits && d < rank; ++d) {
      fits = stored.shape[d] > 0 && state.shape[d] % stored.shape[d] == 0;
      if (fits) block[d] = state.shape[d] / stored.shape[d];
    }
    require(fits && block.product() == stored.shape[rank], ErrorKind::kLayout,
            "{}: has shape {}, which is not that of flattened blocks of {}", stored.name,
            to_string(stored.shape), to_string(state.shape));
    for (const auto& shard : stored.shards) {
      Box box = Box::whole(block);
      for (int d = 0; d < rank; ++d) {
        require(shard.box.size[d] == 1, ErrorKind::kLayout, "{}: {} spans several blocks",
                stored.name, to_string(shard.box));
        box.offset[d] = shard.box.offset[d] * block[d];
      }
      const FlatRun run{.begin = shard.box.offset[rank],
                        .end = shard.box.end(rank),
                        .storage = shard.at.storage,
                        .offset = shard.at.offset};
      add_shards(box, 0, std::span(&run, 1), state.shards);
    }
  }

  // The buckets of one buffer, one after the other; per kind.
  struct Buffer {
    std::vector<std::int64_t> buckets{};  // sizes
    std::map<std::string, std::vector<FlatRun>, std::less<>> runs{};
    // The offsets at which chunks of the masters begin; every parameter begins at one of them.
    // Empty: unknown.
    std::set<std::int64_t> starts{};
  };
  // Buffers by optimizer (dense, expert), model parallel rank and buffer.
  using Buffers = std::map<std::tuple<int, int, int>, Buffer>;

  // [chained_C.]optimizer.distributed.dp_group_idx_M.gbuf_idx_B.dtype_(D, E).bucket_idx_K.KIND
  void add_buckets() {
    struct Bucket {
      BucketKey key{};
      const distckpt::TorchDistTensor* tensor = nullptr;
    };
    std::vector<Bucket> wanted;
    std::vector<const distckpt::TorchDistTensor*> list;
    for (const auto& tensor : checkpoint_.tensors) {
      auto parsed = parse_bucket_key(models::strip_wrappers(tensor.key));
      if (!parsed) continue;
      require(tensor.dtype == DType::kF32 && tensor.shape.rank() == 1, ErrorKind::kLayout,
              "{}: is {} {}, a row of fp32 is expected", tensor.key, short_name(tensor.dtype),
              to_string(tensor.shape));
      wanted.push_back({.key = std::move(*parsed), .tensor = &tensor});
    }
    std::ranges::sort(wanted, {}, [](const Bucket& one) {
      const auto& [group, buffer, bucket, kind] = one.key;
      return std::tuple(group.optimizer, group.rank, buffer, kind, bucket);
    });
    for (const auto& bucket : wanted) list.push_back(bucket.tensor);
    auto resolved = distckpt::resolve_layout(checkpoint_, list);
    take_checksums(resolved.checksums);
    Buffers buffers;
    std::map<std::string_view, std::vector<std::int64_t>> sizes;  // per kind, of this buffer
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const auto& [key, tensor] = wanted[i];
      auto& buffer = buffers[{key.group.optimizer, key.group.rank, key.buffer}];
      const auto kind = canonical_kind(key.kind);
      if (buffer.runs.empty()) sizes.clear();
      auto& of_kind = sizes[kind];
      if (of_kind.empty()) begin = 0;
      require(key.bucket == static_cast<int>(of_kind.size()), ErrorKind::kLayout,
              "{}: bucket {} before it is missing", tensor->key, of_kind.size());
      const auto size = tensor->shape[0];
      of_kind.push_back(size);
      if (buffer.buckets.size() < of_kind.size()) buffer.buckets.push_back(size);
      require(buffer.buckets[of_kind.size() - 1] == size, ErrorKind::kLayout,
              "{}: has {} elements, that of another kind {}", tensor->key, size,
              buffer.buckets[of_kind.size() - 1]);
      auto& runs = buffer.runs[std::string(kind)];
      for (const auto& shard : resolved.layout.tensor(static_cast<std::uint32_t>(i)).shards) {
        runs.push_back({.begin = begin + shard.box.offset[0],
                        .end = begin + shard.box.end(0),
                        .storage = shard.at.storage,
                        .offset = shard.at.offset});
        if (kind == "param") buffer.starts.insert(begin + shard.box.offset[0]);
      }
      begin += size;
    }
    place(buffers);
  }

  // The object param_state of each model parallel rank: its buffers, gathered.
  void add_gathered() {
    Buffers buffers;
    for (const auto& object : checkpoint_.objects) {
      const auto group = parse_group_key(models::strip_wrappers(object.key), "param_state");
      if (!group) continue;
      for (auto& gathered : read_gathered_buffers(checkpoint_, object)) {
        auto& buffer = buffers[{group->optimizer, group->rank, gathered.buffer}];
        buffer.buckets = {gathered.size};
        for (const auto& [kind, at] : gathered.kinds) {
          buffer.runs[std::string(canonical_kind(kind))].push_back(
              {.begin = 0, .end = gathered.size, .storage = at.storage, .offset = at.offset});
        }
      }
    }
    place(buffers);
  }

  void place(Buffers& buffers) {
    const OptimizerBuckets placer(map_, parallel_);
    const bool has_experts = std::ranges::any_of(
        map_.megatron, [](const MegatronTensor& tensor) { return tensor.expert.has_value(); });
    std::vector<ParameterGroup> groups{ParameterGroup::kDense};
    if (has_experts) groups.push_back(ParameterGroup::kExpert);
    for (std::size_t i = 0; i < groups.size(); ++i) {
      for (int rank = 0; rank < placer.num_ranks(groups[i]); ++rank) {
        for (int chunk = 0; chunk < placer.num_chunks(); ++chunk) {
          const auto at = buffers.find({static_cast<int>(i), rank, chunk});
          if (at == buffers.end() && !placer.has_parameters(groups[i], rank, chunk)) continue;
          require(at != buffers.end(), ErrorKind::kLayout,
                  "the optimizer's buckets of model parallel rank {}{}{} are missing", rank,
                  i == 0 ? "" : " of the experts",
                  placer.num_chunks() > 1 ? fmt::format(", model chunk {}", chunk) : "");
          with_context(
              [&] {
                return fmt::format("placing the optimizer's buckets of model parallel rank {}{}",
                                   rank, i == 0 ? "" : " of the experts");
              },
              [&] { place_buffer(placer, groups[i], rank, chunk, at->second); });
          buffers.erase(at);
        }
      }
    }
    if (buffers.empty()) return;
    const auto& [optimizer, group, buffer] = buffers.begin()->first;
    fail(ErrorKind::kLayout,
         "the optimizer's buckets hold buffer {} of model parallel rank {} of optimizer {}, which "
         "the layout in the checkpoint's arguments does not have",
         buffer, group, optimizer);
  }

  void place_buffer(
      const OptimizerBuckets& placer, ParameterGroup group, int rank, int chunk, Buffer& buffer) {
    const auto place = [&](ExpertOrder order) {
      auto placed = placer.place(group, order, rank, chunk, buffer.buckets);
      for (const auto& parameter : placed) {
        require(buffer.starts.empty() || buffer.starts.contains(parameter.begin),
                ErrorKind::kLayout, "{} should begin at element {}, where no chunk does",
                map_.describe(map_.megatron[parameter.tensor.megatron]), parameter.begin);
      }
      return placed;
    };
    std::vector<BucketParameter> placed;
    if (group == ParameterGroup::kExpert) {
      try {
        placed = place(ExpertOrder::kGrouped);
      } catch (const Error&) {
        placed = place(ExpertOrder::kSequential);
      }
    } else {
      placed = place(ExpertOrder::kGrouped);
    }
    for (auto& [kind, runs] : buffer.runs) {
      std::ranges::sort(runs, {}, &FlatRun::begin);
      for (const auto& parameter : placed) add_parameter(parameter, kind, runs);
    }
  }

  void add_parameter(const BucketParameter& parameter,
                     const std::string& kind,
                     std::span<const FlatRun> runs) {
    auto begin = parameter.begin;
    for (const auto& box : parameter.tensor.boxes) {
      const auto sharded = sharded_tensor(map_, parameter.tensor, box, DType::kF32);
      auto& state = state_of(kind, sharded.key, sharded.global_shape);
      auto& to = parameter.copy ? copy_of(state, parameter.tensor.replica_id[1]) : state;
      add_shards(sharded.box(), begin, runs, to.shards);
      begin += box.volume();
    }
  }

  void take_checksums(std::vector<distckpt::ExpectedChecksum>& checksums) {
    checksums_.insert(checksums_.end(), std::make_move_iterator(checksums.begin()),
                      std::make_move_iterator(checksums.end()));
  }

  void link() {
    require(!kinds_.empty(), ErrorKind::kLayout, "the checkpoint holds no state of the optimizer");
    link_optimizer(map_, result_.kinds, static_cast<std::uint32_t>(tensors_.size()), layout_,
                   links_);
    for (const auto& kind : result_.kinds) {
      const auto map = optimizer_map(map_, kind);
      tensors_.insert(tensors_.end(), map.tensors.begin(), map.tensors.end());
    }
    std::vector<Replica> replicas;
    for (auto& [_, copy] : copies_) replicas.push_back(std::move(copy));
    link_replicas(std::move(replicas), layout_, links_);
  }

  const distckpt::TorchDistCheckpoint& checkpoint_;
  const ModelMap& map_;
  const models::ParallelConfig& parallel_;
  distckpt::Layout& layout_;
  distckpt::TensorMap& links_;
  std::vector<distckpt::ModelTensor>& tensors_;
  std::vector<distckpt::ExpectedChecksum>& checksums_;
  OptimizerTensors result_;
  std::map<std::string, State> states_;
  std::map<std::string, Replica> copies_;
  std::set<std::string> kinds_;
};

}  // namespace

ModelMap optimizer_map(const ModelMap& map, std::string_view kind) {
  ModelMap state{.config = map.config, .family = map.family};
  const auto name = [&](std::string_view key) {
    return fmt::format("{}{}.{}", kStatePrefix, kind, key);
  };
  const auto add = [&](const MegatronTensor& tensor) {
    if (tensor.fp32) return;  // kept by hand, not trained
    const auto model = static_cast<std::uint32_t>(state.tensors.size());
    state.tensors.push_back({.name = name(single_key(tensor)),
                             .dtype = DType::kF32,
                             .shape = tensor.shape,
                             .role = distckpt::Role::kState});
    state.megatron.push_back(tensor);
    auto& own = state.megatron.back();
    own.key = name(tensor.key);
    if (!tensor.stacked_key.empty()) own.stacked_key = name(tensor.stacked_key);
    for (auto& also : own.also) also = name(also);
    own.less_one = false;  // the state of what is stored
    own.unused.clear();
    own.parts.clear();  // gate and up may be stored apart
    const int halves = tensor.merge == Merge::kGateUp ? 2 : 1;
    for (int half = 0; half < halves; ++half) {
      Box box = Box::whole(tensor.shape);
      box.size[0] /= halves;
      box.offset[0] = half * box.size[0];
      own.parts.push_back({.model = model, .model_box = box, .box = box});
    }
  };
  for (const auto& tensor : map.megatron) add(tensor);
  if (map.trains_tower) {
    for (const auto& tensor : make_vision_map(map.config).megatron) add(tensor);
  }
  return state;
}

std::vector<std::string> optimizer_kinds(const distckpt::Layout& layout) {
  std::set<std::string> kinds;
  for (const auto& tensor : layout.tensors()) {
    std::string_view rest = tensor.name;
    if (!rest.starts_with(kStatePrefix)) continue;
    rest.remove_prefix(kStatePrefix.size());
    const auto kind = rest.substr(0, rest.find('.'));
    require_known_kind(kind, tensor.name);
    kinds.emplace(kind);
  }
  return {kinds.begin(), kinds.end()};
}

void link_optimizer(const ModelMap& map,
                    const std::vector<std::string>& kinds,
                    std::uint32_t first,
                    const distckpt::Layout& layout,
                    distckpt::TensorMap& links) {
  for (const auto& kind : kinds) {
    const auto state = optimizer_map(map, kind);
    auto found =
        link_megatron(state, layout, LinkedSide::kTarget, fmt::format("{}{}.", kStatePrefix, kind));
    for (auto& link : found.links) link.model += first;
    links.links.insert(links.links.end(), found.links.begin(), found.links.end());
    links.padding.insert(links.padding.end(), found.padding.begin(), found.padding.end());
    first += static_cast<std::uint32_t>(state.tensors.size());
  }
}

OptimizerTensors add_optimizer_tensors(const distckpt::TorchDistCheckpoint& checkpoint,
                                       const ModelMap& map,
                                       const models::ParallelConfig& parallel,
                                       std::string_view form,
                                       distckpt::Layout& layout,
                                       distckpt::TensorMap& links,
                                       std::vector<distckpt::ModelTensor>& tensors,
                                       std::vector<distckpt::ExpectedChecksum>& checksums) {
  return with_context(
      [&] { return fmt::format("reading the optimizer of {}", checkpoint.folder.string()); },
      [&] {
        return Adder(checkpoint, map, parallel, layout, links, tensors, checksums).add(form);
      });
}

}  // namespace ferry::converter
