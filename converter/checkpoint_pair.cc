#include "converter/checkpoint_pair.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "converter/families/hf_config.h"
#include "converter/open/experts_form.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::ModelTensor;

// Two sources as one: the right one's storages come after the left one's.
class PairSource : public distckpt::BoxSource {
 public:
  PairSource(distckpt::FileSource& left, distckpt::FileSource& right, distckpt::StorageId split)
      : left_(left), right_(right), split_(split) {}

  void read(const distckpt::Region& region,
            std::span<std::byte> packed,
            std::vector<distckpt::ChecksumPart>& parts) override {
    if (region.at.storage < split_) return left_.read(region, packed, parts);
    auto shifted = region;
    shifted.at.storage -= split_;
    const auto first = parts.size();
    right_.read(shifted, packed, parts);
    for (auto i = first; i < parts.size(); ++i) parts[i].storage += split_;
  }

  void commit(std::span<const distckpt::ChecksumPart> parts) override {
    std::vector<distckpt::ChecksumPart> mine;
    std::vector<distckpt::ChecksumPart> theirs;
    for (auto part : parts) {
      auto& side = part.storage < split_ ? mine : theirs;
      if (part.storage >= split_) part.storage -= split_;
      side.push_back(part);
    }
    left_.commit(mine);
    right_.commit(theirs);
  }

  std::string name_of(distckpt::StorageId storage) const override {
    return storage < split_ ? left_.name_of(storage) : right_.name_of(storage - split_);
  }

 private:
  distckpt::FileSource& left_;
  distckpt::FileSource& right_;
  distckpt::StorageId split_;
};

// Its storages and scales come after the left one's.
void shift_behind_left(distckpt::CopyPlan& plan, distckpt::StorageId split, int num_scales) {
  const auto shift = [&](distckpt::Cover& cover) {
    for (auto& piece : cover) {
      piece.at.storage += split;
      if (piece.scale >= 0) piece.scale += num_scales;
    }
  };
  for (auto& planned : plan.tensors) {
    shift(planned.source);
    for (auto& cover : planned.replicas) shift(cover);
  }
  for (auto& padding : plan.discards) padding.at.storage += split;
  for (auto& scale : plan.scales) {
    scale.at.storage += split;
    scale.global.storage += split;
  }
}

struct KindNames {
  std::string_view name{};
  std::string_view words{};  // before the details
};
constexpr KindNames kKindNames[] = {{"only_left", "is on the left only"},
                                    {"only_right", "is on the right only"},
                                    {"shape", "shapes differ: "},
                                    {"dtype", "dtypes differ: "}};

// Sides that are quantised in one way are compared as they are; others, dequantised as convert does
// it.
bool quantized_alike(const fs::path& left, const fs::path& right) {
  const auto quantization = stored_quantization(left);
  return quantization && quantization == stored_quantization(right);
}

}  // namespace

std::string_view to_string(UnpairedTensor::Kind kind) {
  return kKindNames[static_cast<std::size_t>(kind)].name;
}

std::string describe(const UnpairedTensor& tensor) {
  return fmt::format("{}{}", kKindNames[static_cast<std::size_t>(tensor.kind)].words,
                     tensor.detail);
}

CheckpointPair::CheckpointPair(const PairOptions& options, bool without_adapter)
    : options_(options),
      keep_quantized_(quantized_alike(options.left, options.right)),
      without_adapter_(without_adapter) {
  left_ = open_side(options_.left, options_.left_iteration);
  right_ = open_side(options_.right, options_.right_iteration);
  require(options_.hf_config.empty() || hf_config_used_, ErrorKind::kUsage,
          "both sides have their own config.json: --hf-config is for Megatron checkpoints");
  compare_experts_in_one_form();
  add_training_states();
  note_selection();
  promote_shared_padding();
  widen_fp32();
  make_plan();
}

Checkpoint CheckpointPair::open_side(const fs::path& path,
                                     std::optional<distckpt::Iteration> iteration) {
  OpenOptions how{.iteration = iteration,
                  .hf_config = {},
                  .keep_quantized = keep_quantized_,
                  .incomplete = true,
                  .without_adapter = without_adapter_};
  if (!locate(path, iteration).has_own_config()) {
    how.hf_config = options_.hf_config;
    hf_config_used_ = true;
  }
  auto checkpoint = open(path, how);
  check_derived(checkpoint);
  return checkpoint;
}

// Experts apart, together or transposed are the same weights.
void CheckpointPair::compare_experts_in_one_form() {
  if (left_.map.family != right_.map.family) return;
  const auto take_form = [&](const Checkpoint& like, Checkpoint& side) {
    if (!take_experts_form(like.map, side)) return;
    notes_.push_back(
        fmt::format("{}: experts lie otherwise than in {} (apart, in one tensor, or transposed), "
                    "and were compared in its form",
                    side.location.folder.string(), like.location.folder.string()));
  };
  try {
    take_form(left_, right_);
  } catch (const Error&) {  // of experts that are quantised, or not all there
    try {
      take_form(right_, left_);
    } catch (const Error& error) {
      notes_.emplace_back(error.what());
    }
  }
}

// Masters and moments are compared where both sides have some, in model space: their forms may
// differ.
void CheckpointPair::add_training_states() {
  const auto comparable = [](const Checkpoint& side) {
    return side.location.format == Format::kTorchDist && has_optimizer(side);
  };
  if (options_.training_state && comparable(left_) && comparable(right_)) {
    try {
      auto left = left_;
      auto right = right_;
      converter::add_training_state(left);
      converter::add_training_state(right);
      left_ = std::move(left);
      right_ = std::move(right);
      return;
    } catch (const Error& error) {
      notes_.push_back(
          fmt::format("the state of the optimizers cannot be compared: {}", error.what()));
    }
  }
  for (const auto* side : {&left_, &right_}) {
    if (side->training_state.empty()) continue;
    notes_.push_back(
        fmt::format("{}: {} entries of training state (optimizer, RNG) were not compared",
                    side->location.folder.string(), side->training_state.size()));
  }
}

void CheckpointPair::note_selection() {
  for (const auto* side : {&left_, &right_}) {
    if (side->num_adapter_tensors > 0) {
      notes_.push_back(fmt::format("{}: {} factors of a LoRA adapter were not compared",
                                   side->location.folder.string(), side->num_adapter_tensors));
    }
    if (!side->hf || side->hf->part.empty()) continue;
    notes_.push_back(fmt::format("{}: is a part of a model: {}", side->location.folder.string(),
                                 describe(side->hf->part)));
  }
  if (options_.selection.is_all()) return;
  auto tensors = left_.tensors;
  tensors.insert(tensors.end(), right_.tensors.begin(), right_.tensors.end());
  options_.selection.require_matches(tensors);
  notes_.push_back(fmt::format("only a part was compared: {}", options_.selection.describe()));
}

// Padding that both sides hold is compared as a tensor is.
void CheckpointPair::promote_shared_padding() {
  auto shared = distckpt::padding_names(left_.tensors, left_.layout, left_.links);
  const auto of_right = distckpt::padding_names(right_.tensors, right_.layout, right_.links);
  std::erase_if(shared, [&](const std::string& name) { return !of_right.contains(name); });
  distckpt::promote_padding(shared, left_.layout, left_.links, left_.tensors);
  distckpt::promote_padding(shared, right_.layout, right_.links, right_.tensors);
}

// A tensor that Megatron keeps in fp32 whatever the model's dtype is compared in fp32.
void CheckpointPair::widen_fp32() {
  for (const auto& tensor : left_.map.megatron) {
    if (!tensor.fp32) continue;
    const auto index = tensor.parts.front().model;
    auto& left = left_.tensors[index];
    const auto there = right_.map.index.find(left.name);
    if (there == right_.map.index.end()) continue;
    auto& right = right_.tensors[there->second];
    if (left.dtype != right.dtype) left.dtype = right.dtype = distckpt::DType::kF32;
  }
}

void CheckpointPair::make_plan() {
  const auto left_plan = distckpt::plan_read(left_.tensors, left_.side());
  auto right_plan = distckpt::plan_read(right_.tensors, right_.side());
  split_ = static_cast<distckpt::StorageId>(left_.layout.storages().size());
  shift_behind_left(right_plan, split_, static_cast<int>(left_plan.scales.size()));
  std::map<std::string_view, std::size_t> right_index;
  for (std::size_t i = 0; i < right_.tensors.size(); ++i) {
    if (options_.selection.selects(right_.tensors[i]))
      right_index.emplace(right_.tensors[i].name, i);
  }

  const bool all = options_.selection.is_all();  // else padding is left alone, too
  if (all) {
    plan_.discards = left_plan.discards;
    std::ranges::move(right_plan.discards, std::back_inserter(plan_.discards));
  }
  plan_.scales = left_plan.scales;
  std::ranges::move(right_plan.scales, std::back_inserter(plan_.scales));
  // Second copies (a tied head) are held against the first of their own side: the left one's are
  // replicas before `right_replica`, the right one's are tensors of their own, behind the others.
  std::vector<distckpt::PlannedTensor> right_copies;
  for (std::size_t i = 0; i < left_.tensors.size(); ++i) {
    const auto& tensor = left_.tensors[i];
    if (!options_.selection.selects(tensor)) continue;
    const auto found = right_index.find(tensor.name);
    if (found == right_index.end()) {
      only_one_side(tensor, UnpairedTensor::Kind::kOnlyLeft, left_.location);
      continue;
    }
    auto& other = right_plan.tensors[found->second];
    right_index.erase(found);
    if (!same_kind(tensor, other.tensor)) continue;
    auto planned = left_plan.tensors[i];
    right_replica_.push_back(static_cast<std::uint32_t>(planned.replicas.size()));
    // Pieces with scales are dequantised whatever this says: it is for those that are cast.
    using distckpt::Transform;
    if (planned.on_read == Transform::kNone || planned.on_read == Transform::kDequantize)
      planned.on_read = other.on_read;
    planned.replicas.push_back(other.source);
    planned.less = planned.source.empty() ? 0 : planned.source.front().less;
    plan_.tensors.push_back(std::move(planned));
    if (!other.replicas.empty()) right_copies.push_back(std::move(other));
  }
  num_tensors_ = plan_.tensors.size();
  std::ranges::move(right_copies, std::back_inserter(plan_.tensors));
  for (const auto& [name, index] : right_index) {
    only_one_side(right_.tensors[index], UnpairedTensor::Kind::kOnlyRight, right_.location);
  }
}

void CheckpointPair::only_one_side(const ModelTensor& tensor,
                                   UnpairedTensor::Kind kind,
                                   const Location& location) {
  if (tensor.role == distckpt::Role::kDerived) {
    notes_.push_back(fmt::format("{}: follows from the configuration, and is in {} only",
                                 tensor.name, location.folder.string()));
    return;
  }
  unpaired_.push_back({.kind = kind, .tensor = tensor.name});
}

bool CheckpointPair::same_kind(const ModelTensor& left, const ModelTensor& right) {
  if (left.shape != right.shape) {
    unpaired_.push_back(
        {.kind = UnpairedTensor::Kind::kShape,
         .tensor = left.name,
         .detail = fmt::format("{}, {}", to_string(left.shape), to_string(right.shape))});
    return false;
  }
  if (left.dtype != right.dtype) {
    unpaired_.push_back(
        {.kind = UnpairedTensor::Kind::kDType,
         .tensor = left.name,
         .detail = fmt::format("{}, {}", short_name(left.dtype), short_name(right.dtype))});
    return false;
  }
  return true;
}

bool CheckpointPair::compared_less_one(std::size_t index) const {
  const auto is_less = [](const distckpt::Cover& cover) {
    return std::ranges::any_of(cover, [](const distckpt::Piece& piece) { return piece.less != 0; });
  };
  const auto& planned = plan_.tensors[index];
  return is_less(planned.source) || std::ranges::any_of(planned.replicas, is_less);
}

std::int64_t CheckpointPair::num_bytes() const {
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < num_tensors_; ++i) bytes += tensor(i).num_bytes();
  return bytes;
}

void CheckpointPair::compare(const std::function<void(const distckpt::Comparison&)>& compared,
                             const ProgressFunction& progress,
                             bool whole_tensors) {
  const auto left = left_.source();
  const auto right = right_.source();
  PairSource both(*left, *right, split_);
  const auto observe = [&](const distckpt::Comparison& part) {
    const bool is_left = part.tensor < num_tensors_;
    if (is_left && part.replica == right_replica_[part.tensor]) return compared(part);
    if (part.equal) return;
    fail(ErrorKind::kLayout, "{}: {}", (is_left ? left_ : right_).location.folder.string(),
         distckpt::describe_difference(plan_, both, part));
  };
  const distckpt::Executor executor(
      {.threads = distckpt::reading_threads(
           distckpt::reading_threads(options_.threads, options_.left), options_.right),
       .max_memory = options_.max_memory,
       .in_order = whole_tensors ? distckpt::InOrder::kTensors : distckpt::InOrder::kStretches,
       .on_compared = observe});
  const auto done = wait_reporting(executor.submit(plan_, both, nullptr), "comparing", progress);
  left->verify_checksums();
  right->verify_checksums();
  for (const auto& padding : done.nonzero_padding) {
    notes_.push_back(
        fmt::format("{} {}: padding that is not zero", padding.tensor, to_string(padding.box)));
  }
}

}  // namespace ferry::converter
