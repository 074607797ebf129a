#include "converter/bridge/tensor_stream.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "converter/families/megatron_links.h"
#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"
#include "distckpt/plan/box_io.h"
#include "distckpt/storage/source_tree.h"
#include "models/spec/mesh_shape.h"
#include "models/spec/sharding.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::Dims;
using distckpt::DType;
using distckpt::ModelTensor;
using distckpt::Piece;
using distckpt::Shape;
using distckpt::StorageId;

// Large enough for all threads to be busy, small enough for some to be ahead.
constexpr std::int64_t kBatchBytes = std::int64_t{64} << 20;

bool is_of_model(const ModelTensor& tensor) {
  return tensor.role == distckpt::Role::kWeight || tensor.role == distckpt::Role::kDerived;
}

// The parameters of the whole model under the keys of modules, the vocabulary padded.
struct WholeModel {
  std::vector<std::string> keys{};
  std::vector<Shape> shapes{};
  std::vector<DType> dtypes{};
  std::unordered_map<std::string, std::size_t> index{};
};

WholeModel whole_model(const Checkpoint& checkpoint, const models::ParallelConfig& parallel) {
  WholeModel model;
  for (const auto& tensor : checkpoint.map.megatron) {
    auto shape = tensor.shape;
    if (tensor.vocabulary) shape[0] = parallel.padded_vocab_size(shape[0]);
    model.index.emplace(single_key(tensor), model.keys.size());
    model.keys.push_back(single_key(tensor));
    model.shapes.push_back(shape);
    model.dtypes.push_back(checkpoint.tensors[tensor.parts.front().model].dtype);
  }
  return model;
}

void require_matching_patterns(const Selection& selection, const std::vector<std::string>& names) {
  for (const auto* patterns : {&selection.include, &selection.exclude}) {
    for (const auto& pattern : *patterns) {
      const bool any = std::ranges::any_of(
          names, [&](const std::string& name) { return matches(pattern, name); });
      require(any, ErrorKind::kUsage, "'{}': matches no parameter of the model", pattern);
    }
  }
}

// The target of a plan: the wanted boxes in storages 1, 2, ... in their order, everything else of
// their tensors in storage 0, which nobody writes.
class WantedLayout {
 public:
  explicit WantedLayout(const WantedTensors& wanted) : wanted_(wanted) {
    layout_.add_storage(distckpt::RankStorage{});
    for (const auto& one : wanted.tensors)
      layout_.add_storage(distckpt::RankStorage{.rank = 0, .size = one.num_bytes()});
    for (std::size_t i = 0; i < wanted.tensors.size(); ++i)
      boxes_[wanted.tensors[i].name].push_back(i);
  }

  void add(const std::string& name, DType dtype, const Shape& shape) {
    distckpt::TensorLayout tensor{.name = name, .dtype = dtype, .shape = shape, .shards = {}};
    std::vector<Box> rest{Box::whole(shape)};
    if (const auto at = boxes_.find(name); at != boxes_.end()) {
      for (const auto index : at->second) place(index, tensor, rest);
    }
    for (const auto& box : rest) {
      if (!box.empty()) tensor.shards.push_back(distckpt::packed_shard(box, dtype, 0, 0));
    }
    layout_.add_tensor(std::move(tensor));
  }

  distckpt::Layout take() { return std::move(layout_); }

 private:
  void place(std::size_t index, distckpt::TensorLayout& tensor, std::vector<Box>& rest) const {
    std::int64_t offset = 0;
    for (const auto& box : wanted_.tensors[index].boxes) {
      if (box.empty()) continue;
      tensor.shards.push_back(
          distckpt::packed_shard(box, tensor.dtype, static_cast<StorageId>(index + 1), offset));
      offset += box.volume() * size_of(tensor.dtype);
      std::vector<Box> left;
      for (const auto& one : rest) {
        const auto hole = intersect(one, box);
        if (!hole) {
          left.push_back(one);
          continue;
        }
        for (const auto& part : subtract(one, *hole)) left.push_back(part);
      }
      rest = std::move(left);
    }
  }

  const WantedTensors& wanted_;
  std::map<std::string, std::vector<std::size_t>> boxes_;
  distckpt::Layout layout_;
};

// The memory of a batch: storage `first` and those that follow.
class BatchSink : public distckpt::BoxSink {
 public:
  BatchSink(std::vector<std::byte*> memory, StorageId first)
      : memory_(std::move(memory)), first_(first) {}

  void write(const distckpt::Region& region,
             std::span<const std::byte> packed,
             std::vector<distckpt::ChecksumPart>& /*parts*/) override {
    if (packed.empty()) return;
    distckpt::copy_strided(data(region), region.at.strides, packed.data(), packed_strides(region),
                           region.size, region.element_size);
  }

  std::span<std::byte> lease(const distckpt::Region& region) override {
    const auto runs = fold_runs(region);
    if (runs.num_runs() != 1) return {};
    return {data(region), static_cast<std::size_t>(runs.run_bytes)};
  }

 private:
  std::byte* data(const distckpt::Region& region) const {
    return memory_.at(region.at.storage - first_) + region.at.offset;
  }

  std::vector<std::byte*> memory_;
  StorageId first_;
};

}  // namespace

WantedTensors whole_tensors(const Checkpoint& checkpoint, const Selection& selection) {
  if (!selection.is_all()) selection.require_matches(checkpoint.tensors);
  WantedTensors wanted;
  for (const auto& tensor : checkpoint.tensors) {
    if (!is_of_model(tensor) || !selection.selects(tensor)) continue;
    wanted.tensors.push_back({.name = tensor.name,
                              .dtype = tensor.dtype,
                              .shape = tensor.shape,
                              .boxes = {Box::whole(tensor.shape)}});
  }
  return wanted;
}

WantedTensors tensors_of_rank(const Checkpoint& checkpoint,
                              const models::ParallelConfig& parallel,
                              int rank,
                              const Selection& selection) {
  const auto& config = checkpoint.map.config;
  const models::MeshShape mesh(parallel, parallel.world_size());
  require(rank >= 0 && rank < mesh.world_size(), ErrorKind::kUsage,
          "rank {}: the mesh has {} ranks", rank, mesh.world_size());
  models::check_fits(config, mesh);
  const auto at = mesh.coordinates(rank);
  const auto whole = whole_model(checkpoint, parallel);
  WantedTensors wanted{.megatron_names = true, .parallel = parallel, .tensors = {}};
  require_matching_patterns(selection, whole.keys);  // on every rank alike
  for (const auto& chunk : models::stage_chunks(config, parallel, at.pp)) {
    for (const auto& parameter : models::parameter_layout(config, mesh, at, chunk, {})) {
      if (!selection.selects(parameter.key)) continue;
      const auto found = whole.index.find(parameter.key);
      if (found == whole.index.end() && checkpoint.hf && !checkpoint.hf->part.empty()) {
        throw Error(ErrorKind::kLayout,
                    fmt::format("{}: {} holds a part of a model, without it", parameter.key,
                                checkpoint.location.folder.string()),
                    "names=\"hf\" gives the tensors that are there");
      }
      require(found != whole.index.end(), ErrorKind::kUsage,
              "{}: keep_quantized leaves its blocks and their scales as they are, for which "
              "Megatron-Core's modules have no place",
              parameter.key);
      wanted.tensors.push_back({.name = parameter.key,
                                .dtype = whole.dtypes[found->second],
                                .shape = parameter.shape,
                                .boxes = parameter.boxes});
    }
  }
  return wanted;
}

WantedTensors box_of_tensor(const Checkpoint& checkpoint,
                            const std::string& name,
                            const std::optional<Box>& box) {
  WantedTensors wanted;
  Shape shape;
  auto dtype = DType::kBF16;
  const auto tensor = std::ranges::find(checkpoint.tensors, name, &ModelTensor::name);
  if (tensor != checkpoint.tensors.end()) {
    shape = tensor->shape;
    dtype = tensor->dtype;
  } else {
    wanted.megatron_names = true;
    wanted.parallel.make_vocab_size_divisible_by = 1;
    const auto whole = whole_model(checkpoint, wanted.parallel);
    const auto at = whole.index.find(name);
    require(at != whole.index.end(), ErrorKind::kNotFound,
            "{}: neither a Hugging Face tensor of this {} nor a key of Megatron-Core's modules",
            name, checkpoint.map.config.family);
    shape = whole.shapes[at->second];
    dtype = whole.dtypes[at->second];
  }
  const auto part = box.value_or(Box::whole(shape));
  require(part.rank() == shape.rank() && part.inside(shape), ErrorKind::kUsage,
          "{}: {} is no box of its shape {}", name, to_string(part), to_string(shape));
  wanted.tensors.push_back({.name = name, .dtype = dtype, .shape = part.size, .boxes = {part}});
  return wanted;
}

struct TensorStream::Batch {
  Batch(Range of, distckpt::CopyPlan copy, std::vector<std::byte*> memory)
      : range(of),
        plan(std::move(copy)),
        sink(std::move(memory), static_cast<StorageId>(of.begin + 1)) {}

  Range range{};
  distckpt::CopyPlan plan;
  BatchSink sink;
  std::optional<distckpt::Execution> execution{};  // nothing: there is nothing to read
};

TensorStream::TensorStream(std::shared_ptr<const Checkpoint> checkpoint,
                           WantedTensors wanted,
                           const StreamOptions& options)
    : checkpoint_(std::move(checkpoint)), wanted_(std::move(wanted)), options_(options) {
  options_.threads = distckpt::reading_threads(options_.threads, checkpoint_->location.root);
  with_context(
      [&] { return fmt::format("planning to read {}", checkpoint_->location.folder.string()); },
      [&] { make_plan(); });
  cut_into_batches();
  source_ = checkpoint_->source();
}

TensorStream::~TensorStream() {
  cancel();
}

void TensorStream::cancel() {
  for (const auto& batch : running_)
    if (batch->execution) batch->execution->cancel();
}

void TensorStream::make_plan() {
  auto tensors = checkpoint_->tensors;
  auto source = checkpoint_->links;
  if (options_.dtype) {
    for (auto& tensor : tensors) {
      if (tensor.role == distckpt::Role::kWeight && distckpt::is_floating_point(tensor.dtype) &&
          distckpt::can_cast(tensor.dtype, *options_.dtype))
        tensor.dtype = *options_.dtype;
    }
    for (const auto& tensor : checkpoint_->map.megatron) {
      if (!tensor.fp32) continue;  // a router's bias stays what it is
      auto& kept = tensors[tensor.parts.front().model];
      kept.dtype = checkpoint_->tensors[tensor.parts.front().model].dtype;
    }
  }
  std::unordered_map<std::string, DType> dtypes;
  distckpt::TensorMap target;
  WantedLayout builder(wanted_);
  std::vector<std::optional<std::uint32_t>> at(tensors.size());
  std::vector<ModelTensor> kept;
  if (wanted_.megatron_names) {
    const auto model = whole_model(*checkpoint_, wanted_.parallel);
    for (std::size_t i = 0; i < model.keys.size(); ++i) {
      const auto first = checkpoint_->map.megatron[i].parts.front().model;
      dtypes.emplace(model.keys[i], tensors[first].dtype);
      builder.add(model.keys[i], tensors[first].dtype, model.shapes[i]);
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const bool beside = checkpoint_->map.is_carried(tensors[i].name);  // no module has a tower
      if (tensors[i].role != distckpt::Role::kWeight || beside) continue;
      at[i] = static_cast<std::uint32_t>(kept.size());
      kept.push_back(tensors[i]);
    }
  } else {
    std::unordered_map<std::string, std::size_t> index;
    for (std::size_t i = 0; i < tensors.size(); ++i) index.emplace(tensors[i].name, i);
    for (const auto& one : wanted_.tensors) {
      const auto i = index.at(one.name);
      const auto number = static_cast<std::uint32_t>(kept.size());
      const auto box = Box::whole(tensors[i].shape);
      at[i] = number;
      kept.push_back(tensors[i]);
      dtypes.emplace(one.name, tensors[i].dtype);
      builder.add(one.name, tensors[i].dtype, tensors[i].shape);
      target.links.push_back(
          {.model = number, .model_box = box, .stored = number, .stored_box = box});
    }
  }
  for (auto& one : wanted_.tensors) one.dtype = dtypes.at(one.name);
  distckpt::restrict_links(source, checkpoint_->layout, at);
  const auto layout = builder.take();
  if (wanted_.megatron_names) target = link_megatron(checkpoint_->map, layout);
  plan_ = distckpt::keep_targets(
      distckpt::plan_copy(
          kept, {.layout = &checkpoint_->layout, .map = &source},
          {.layout = &layout, .map = &target},
          options_.dtype ? distckpt::Transform::kCast : distckpt::Transform::kCastExact),
      [](StorageId storage) { return storage > 0; });
  plan_.discards.clear();  // convert and verify look at the padding of a source
}

void TensorStream::cut_into_batches() {
  parts_.resize(wanted_.tensors.size());
  fills_.resize(wanted_.tensors.size());
  for (std::uint32_t t = 0; t < plan_.tensors.size(); ++t) {
    const auto& targets = plan_.tensors[t].targets;
    for (std::uint32_t c = 0; c < targets.size(); ++c) {
      for (std::uint32_t p = 0; p < targets[c].size(); ++p)
        parts_[targets[c][p].at.storage - 1].push_back({.tensor = t, .cover = c, .piece = p});
    }
  }
  for (std::uint32_t f = 0; f < plan_.fills.size(); ++f)
    fills_[plan_.fills[f].at.storage - 1].push_back(f);
  const auto most = std::max<std::int64_t>(1, std::min(kBatchBytes, options_.read_ahead / 4));
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < wanted_.tensors.size(); ++i) {
    const auto more = wanted_.tensors[i].num_bytes();
    if (batches_.empty() || bytes + more > most) {
      batches_.push_back({.begin = i, .end = i});
      bytes = 0;
    }
    batches_.back().end = i + 1;
    bytes += more;
    total_ += more;
  }
}

// The part of the plan that writes these tensors.
distckpt::CopyPlan TensorStream::plan_of(const Range& range) const {
  distckpt::CopyPlan plan;
  std::unordered_map<std::uint32_t, std::size_t> index;  // of tensors that are in `plan`
  std::unordered_map<int, int> scales;                   // likewise
  const auto renumber = [&](Piece piece) {
    if (piece.scale < 0) return piece;
    const auto [at, is_new] = scales.emplace(piece.scale, static_cast<int>(plan.scales.size()));
    if (is_new) plan.scales.push_back(plan_.scales[static_cast<std::size_t>(piece.scale)]);
    piece.scale = at->second;
    return piece;
  };
  for (auto i = range.begin; i < range.end; ++i) {
    for (const auto& part : parts_[i]) {
      const auto& whole = plan_.tensors[part.tensor];
      const auto [at, is_new] = index.emplace(part.tensor, plan.tensors.size());
      if (is_new) {
        auto& one = plan.tensors.emplace_back(distckpt::PlannedTensor{.tensor = whole.tensor,
                                                                      .source = {},
                                                                      .replicas = {},
                                                                      .targets = {},
                                                                      .on_read = whole.on_read});
        one.targets.emplace_back();
        for (const auto& piece : whole.source) one.source.push_back(renumber(piece));
        for (const auto& cover : whole.replicas) {
          one.replicas.emplace_back();
          for (const auto& piece : cover) one.replicas.back().push_back(renumber(piece));
        }
      }
      plan.tensors[at->second].targets.front().push_back(whole.targets[part.cover][part.piece]);
    }
    for (const auto fill : fills_[i]) plan.fills.push_back(plan_.fills[fill]);
  }
  return plan;
}

std::int64_t TensorStream::bytes_of(const Range& range) const {
  std::int64_t bytes = 0;
  for (auto i = range.begin; i < range.end; ++i) bytes += wanted_.tensors[i].num_bytes();
  return bytes;
}

std::optional<TensorStream::Range> TensorStream::next_batch() const {
  if (next_ == batches_.size()) return std::nullopt;
  const auto& batch = batches_[next_];
  if (ahead_ > 0 && ahead_ + bytes_of(batch) > options_.read_ahead) return std::nullopt;
  return batch;
}

void TensorStream::start(std::vector<std::byte*> memory) {
  const auto range = batches_.at(next_);
  require(memory.size() == range.end - range.begin, ErrorKind::kBug, "memory for {} of {} tensors",
          memory.size(), range.end - range.begin);
  auto batch = std::make_unique<Batch>(range, plan_of(range), std::move(memory));
  if (!batch->plan.tensors.empty() || !batch->plan.fills.empty()) {
    const distckpt::Executor executor(
        {.threads = options_.threads, .max_memory = options_.max_memory, .on_compared = {}});
    batch->execution.emplace(executor.submit_pieces(batch->plan, *source_, batch->sink));
  }
  running_.push_back(std::move(batch));
  ahead_ += bytes_of(range);
  ++next_;
}

std::optional<TensorStream::Range> TensorStream::wait(const ProgressFunction& progress) {
  if (running_.empty()) {
    if (next_ == batches_.size()) source_->verify_checksums();
    return std::nullopt;
  }
  auto& batch = *running_.front();
  const auto report = [&](std::int64_t bytes, bool finished) {
    return !progress || progress({.stage = "reading",
                                  .bytes_done = bytes,
                                  .bytes_total = total_,
                                  .finished = finished});
  };
  with_context([&] { return fmt::format("reading {}", checkpoint_->location.folder.string()); },
               [&] {
                 if (!batch.execution) return;
                 while (!batch.execution->wait_for(std::chrono::milliseconds(100))) {
                   if (!report(done_ + batch.execution->bytes_done(), false)) cancel();
                 }
                 batch.execution->wait();
               });
  const auto range = batch.range;
  running_.pop_front();
  done_ += bytes_of(range);
  if (!report(done_, done_ == total_)) throw Error(ErrorKind::kCancelled, "interrupted");
  return range;
}

void TensorStream::release(const Range& batch) {
  ahead_ -= bytes_of(batch);
}

}  // namespace ferry::converter
