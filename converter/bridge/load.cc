#include "converter/bridge/load.h"

#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "converter/bridge/carried_tensors.h"
#include "converter/bridge/whole_checksums.h"
#include "converter/conversion_plan.h"
#include "converter/families/megatron_links.h"
#include "converter/optimizer/optimizer_tensors.h"
#include "distckpt/base/error.h"
#include "distckpt/base/stopwatch.h"

namespace ferry::converter {
namespace {

using distckpt::ModelTensor;
using distckpt::Role;
using models::Head;
using models::TransformerConfig;

// Finds the tensors that only one of two configurations may have.
struct ConfigDifference {
  bool prediction_layers = false;  // the model lacks them
  bool head = false;               // the model has a new one

  bool may_stay_behind(const TransformerConfig& of_checkpoint, std::string_view name) const {
    return (prediction_layers && is_prediction_tensor(of_checkpoint, name)) ||
           (head && is_head(name));
  }
  static bool is_head(std::string_view name) {
    return name == "lm_head.weight" || name.starts_with("score.");
  }
};

ConfigDifference difference(const TransformerConfig& checkpoint,
                            const TransformerConfig& model,
                            bool new_head) {
  return {.prediction_layers = model.mtp_num_layers < checkpoint.mtp_num_layers,
          .head = new_head && checkpoint.head == Head::kLanguageModel &&
                  model.head != Head::kLanguageModel};
}

class LoadPlanner {
 public:
  LoadPlanner(const Checkpoint& checkpoint,
              const distckpt::MeshLayout& mesh,
              const LoadOptions& options)
      : checkpoint_(checkpoint), mesh_(mesh), options_(options) {}

  LoadPlan plan() {
    const auto& own = checkpoint_.map;
    const auto config = options_.config.value_or(own.config);
    auto other = options_.vision_tower  ? make_vision_map(config)
                 : config == own.config ? ModelMap{}
                                        : make_model_map(config, spelling_of(own));
    const bool trains_tower = !options_.vision_tower && holds_tower(mesh_.layout);
    if (trains_tower != own.trains_tower && other.family == nullptr) other = own;
    if (other.family != nullptr) other.trains_tower = trains_tower;
    const auto& model = other.family == nullptr ? own : other;
    const auto differ = difference(own.config, config, options_.new_head);
    source_ = checkpoint_.links;
    target_ = link_megatron(model, mesh_.layout);
    auto wanted = model.tensors;
    if (trains_tower) add_held_tower(config, mesh_.layout, wanted, target_);
    const auto kinds = optimizer_kinds(mesh_.layout);
    link_optimizer(model, kinds, static_cast<std::uint32_t>(wanted.size()), mesh_.layout, target_);
    for (const auto& kind : kinds) {
      const auto state = optimizer_map(model, kind).tensors;
      wanted.insert(wanted.end(), state.begin(), state.end());
    }
    join(wanted, differ);
    if (options_.keep_padding) {
      distckpt::promote_shared_padding(checkpoint_.layout, source_, mesh_.layout, target_,
                                       tensors_);
    }
    if (options_.amendment == nullptr) choose_dtypes();  // else elements are amended as stored
    auto plan = distckpt::plan_copy(
        tensors_, {.layout = &checkpoint_.layout, .map = &source_},
        {.layout = &mesh_.layout, .map = &target_},
        options_.round ? distckpt::Transform::kCast : distckpt::Transform::kCastExact);
    for (const auto& planned : plan.tensors) {
      if (!planned.replicas.empty()) result_.second_copies.push_back(planned.tensor.name);
    }
    if (options_.amendment == nullptr)  // else each tensor is read whole
      checksums_ = checksums_to_read(plan, mesh_, checkpoint_.checksums);
    result_.copy = distckpt::part_of_rank(std::move(plan), mesh_);
    return std::move(result_);
  }

  // After plan(): those that this rank reads besides.
  const std::vector<std::uint32_t>& checksums() const { return checksums_; }

 private:
  // The tensors that both sides have, in the order of the checkpoint; links of others are taken
  // out.
  void join(const std::vector<ModelTensor>& wanted, const ConfigDifference& differ) {
    std::unordered_map<std::string_view, std::size_t> index;
    for (std::size_t i = 0; i < wanted.size(); ++i) index.emplace(wanted[i].name, i);
    std::vector<std::optional<std::uint32_t>> of_source;
    std::vector<std::optional<std::uint32_t>> of_model(wanted.size());
    for (const auto& tensor : checkpoint_.tensors) {
      of_source.emplace_back();
      const auto at = index.find(tensor.name);
      const bool other_head = differ.head && ConfigDifference::is_head(tensor.name);
      if (at == index.end() || other_head) {
        leave_behind(tensor, differ);
        continue;
      }
      const auto& shape = wanted[at->second].shape;
      require(shape == tensor.shape, ErrorKind::kLayout,
              "{}: has shape {} in the checkpoint, {} in the model", tensor.name,
              to_string(tensor.shape), to_string(shape));
      of_source.back() = of_model[at->second] = static_cast<std::uint32_t>(tensors_.size());
      tensors_.push_back(tensor);
    }
    distckpt::restrict_links(source_, checkpoint_.layout, of_source);
    for (std::size_t i = 0; i < of_model.size(); ++i) {
      if (of_model[i]) continue;
      const auto& name = wanted[i].name;
      require(differ.head && ConfigDifference::is_head(name), ErrorKind::kLayout,
              "{}: the checkpoint does not hold it, the model has it", name);
      result_.from_zero.push_back(name);
    }
    // A target without a source is filled with zeros, as padding is.
    distckpt::TensorMap kept{.padding = std::move(target_.padding)};
    for (auto link : target_.links) {
      if (of_model[link.model]) {
        link.model = *of_model[link.model];
        kept.links.push_back(link);
      } else {
        kept.padding.push_back({.stored = link.stored, .box = link.stored_box});
      }
    }
    target_ = std::move(kept);
  }

  void leave_behind(const ModelTensor& tensor, const ConfigDifference& differ) {
    if (tensor.role == Role::kDerived) return;  // check_derived() knows it
    require(tensor.role == Role::kState || options_.vision_tower ||
                checkpoint_.map.is_carried(tensor.name) ||
                differ.may_stay_behind(checkpoint_.map.config, tensor.name),
            ErrorKind::kLayout, "{}: the model has no place for it", tensor.name);
    result_.left_behind.push_back(tensor.name);
  }

  // The model's dtypes, so that elements are converted as they are read. Only what is dequantised
  // and then widened goes through the dtype that it would have in a converted checkpoint.
  void choose_dtypes() {
    std::vector<bool> scaled(tensors_.size(), false);
    for (const auto& link : source_.links) {
      if (link.scale >= 0) scaled[link.model] = true;
    }
    for (const auto& link : target_.links) {
      auto& dtype = tensors_[link.model].dtype;
      const auto wanted = mesh_.layout.tensor(link.stored).dtype;
      if (link.copy > 0 || (scaled[link.model] && size_of(wanted) > size_of(dtype))) continue;
      dtype = wanted;
    }
  }

  const Checkpoint& checkpoint_;
  const distckpt::MeshLayout& mesh_;
  const LoadOptions& options_;
  std::vector<ModelTensor> tensors_;
  distckpt::TensorMap source_;
  distckpt::TensorMap target_;
  LoadPlan result_;
  std::vector<std::uint32_t> checksums_;
};

LoadPlan plan_with(LoadPlanner& planner, const Checkpoint& checkpoint, std::size_t num_ranks) {
  return with_context(
      [&] {
        return fmt::format("planning to load {} onto {} ranks", checkpoint.location.folder.string(),
                           num_ranks);
      },
      [&] { return planner.plan(); });
}

// An amendment numbers tensors as the checkpoint does, a plan those that the rank has a part of.
class AmendedTensors {
 public:
  AmendedTensors(const Checkpoint& checkpoint, const distckpt::CopyPlan& plan)
      : num_tensors_(static_cast<std::uint32_t>(checkpoint.tensors.size())) {
    require_amendable(plan);
    std::unordered_map<std::string_view, std::uint32_t> index;
    for (std::uint32_t i = 0; i < num_tensors_; ++i) index.emplace(checkpoint.tensors[i].name, i);
    for (const auto& planned : plan.tensors) {
      const auto found = index.find(planned.tensor.name);
      at_.push_back(found == index.end() ? std::nullopt : std::optional(found->second));
    }
  }

  void amend(Amendment& amendment,
             std::uint32_t tensor,
             std::int64_t element,
             std::span<std::byte> elements) const {
    if (at_[tensor]) amendment.amend(*at_[tensor], element, elements);  // else padding
  }

  // A rank that read all of the model knows whether it became what it had to become.
  void finish(Amendment& amendment, const std::vector<distckpt::Digest>& digests) const {
    std::vector<distckpt::Digest> all(num_tensors_);
    std::size_t found = 0;
    for (std::size_t i = 0; i < at_.size(); ++i) {
      if (!at_[i]) continue;
      all[*at_[i]] = digests[i];
      ++found;
    }
    if (found == num_tensors_) amendment.finish(all);
  }

 private:
  std::uint32_t num_tensors_;
  std::vector<std::optional<std::uint32_t>> at_;
};

}  // namespace

FindTensor spelling_of(const ModelMap& map) {
  return [&map](const std::string& name) -> std::optional<distckpt::Shape> {
    const auto found = map.index.find(name);
    if (found == map.index.end()) return std::nullopt;
    return map.tensors[found->second].shape;
  };
}

TransformerConfig with_value_head(TransformerConfig config) {
  if (config.head != Head::kLanguageModel) return config;
  config.head = Head::kTokenClassification;
  config.num_labels = 1;
  config.mtp_num_layers = 0;
  return config;
}

LoadPlan plan_load(const Checkpoint& checkpoint,
                   const distckpt::MeshLayout& mesh,
                   const LoadOptions& options) {
  LoadPlanner planner(checkpoint, mesh, options);
  return plan_with(planner, checkpoint, mesh.ranks.size());
}

LoadReport load(const Checkpoint& checkpoint,
                const distckpt::MeshLayout& mesh,
                distckpt::MemorySink& memory,
                const LoadOptions& options,
                const ProgressFunction& progress) {
  const distckpt::Stopwatch stopwatch;
  check_derived(checkpoint);
  LoadPlanner planner(checkpoint, mesh, options);
  auto plan = plan_with(planner, checkpoint, mesh.ranks.size());
  distckpt::ExecutorOptions how{.threads = options.threads,
                                .max_memory = options.max_memory,
                                .staging = options.staging,
                                .on_compared = {}};
  auto* const amendment = options.amendment;
  std::optional<AmendedTensors> amended;
  if (amendment != nullptr) {
    amended.emplace(checkpoint, plan.copy);
    how.on_read = [&](auto tensor, auto element, auto elements) {
      amended->amend(*amendment, tensor, element, elements);
    };
  }
  const distckpt::Executor executor(how);
  const auto source = checkpoint.source();
  try {
    auto done = wait_reporting(amended ? executor.submit(plan.copy, *source, &memory)
                                       : executor.submit_pieces(plan.copy, *source, memory),
                               "loading", progress);
    source->verify_checksums();
    read_checksums(*source, checkpoint.checksums, planner.checksums(), options.threads);
    if (amended) amended->finish(*amendment, done.digests);
    memory.finish();
    return {.bytes = done.bytes,
            .seconds = stopwatch.seconds(),
            .threads = distckpt::staging_budget(plan.copy, how, distckpt::Staged::kPieces).threads,
            .nonzero_padding = std::move(done.nonzero_padding),
            .left_behind = std::move(plan.left_behind),
            .from_zero = std::move(plan.from_zero),
            .second_copies = std::move(plan.second_copies)};
  } catch (Error& error) {
    error.add_context(fmt::format("loading {}", checkpoint.location.folder.string()));
    throw;
  }
}

}  // namespace ferry::converter
