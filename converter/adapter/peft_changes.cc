#include "converter/adapter/peft_changes.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "converter/adapter/base_names.h"
#include "converter/adapter/expert_modules.h"
#include "converter/adapter/factors/adapter_map.h"
#include "converter/adapter/factors/lora_settings.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::ModelTensor;
using distckpt::Shape;

// An adapter of PEFT. Its tensors are those of its file.
class PeftReader {
 public:
  PeftReader(const fs::path& folder, const Checkpoint& base)
      : base_(base.map),
        names_(base),
        folder_(folder),
        settings_(folder / kAdapterConfig),
        experts_(base_) {}

  Checkpoint open() {
    auto checkpoint = open_file(adapter_weights(folder_));
    source_ = (folder_ / kAdapterWeights).string();
    for (const auto& tensor : checkpoint.tensors) {
      const auto key = settings_.parse_key(tensor.name, source_);
      if (key.part.empty() || key.part == kTokenRows) {
        replaced_.emplace_back(key, &tensor);
        continue;
      }
      modules_[key.module].emplace(key.part, &tensor);
      peft_modules_.insert(peft_module(base_, key.module));
    }
    require(!modules_.empty() || !replaced_.empty(), ErrorKind::kCorrupt, "{}: changes nothing",
            source_);
    for (const auto& [module, parts] : modules_) add_module(module, parts);
    for (const auto& [key, tensor] : replaced_) add_replaced(key, *tensor);
    require_named_parameters();
    return checkpoint;
  }

  std::vector<AdaptedTensor> take() { return std::move(tensors_); }
  const std::vector<TiedTensors>& tied() const { return tied_; }

 private:
  using Parts = std::map<std::string, const ModelTensor*>;

  void require_matrix(const ModelTensor& tensor) const {
    require(tensor.shape.rank() == 2 && distckpt::is_floating_point(tensor.dtype),
            ErrorKind::kLayout, "{}: {}: is {} {}, expected a matrix of floating-point numbers",
            source_, tensor.name, short_name(tensor.dtype), to_string(tensor.shape));
  }

  const ModelTensor& factor(const std::string& module,
                            const Parts& parts,
                            const std::string& name) const {
    const auto found = parts.find(name);
    require(found != parts.end(), ErrorKind::kCorrupt, "{}: {}: one of two factors is missing",
            source_, module);
    require_matrix(*found->second);
    return *found->second;
  }

  void add_module(const std::string& module, const Parts& parts) {
    const auto experts =
        experts_.find(peft_module(base_, module), settings_,
                      [&](const std::string& other) { return peft_modules_.contains(other); });
    if (experts) {
      add_experts(module, parts, *experts);
    } else if (!is_second_end(module, parts)) {
      tensors_.push_back(adapted_tensor(module, parts));
      adapted_parameters_.push_back(module + ".weight");
    }
  }

  // True of the output layer of an adapter that changes it and the embedding, which are one tensor,
  // alike. PEFT's merge changes both ends by what was trained for one, or by the change of both.
  bool is_second_end(const std::string& module, const Parts& parts) {
    const auto found = names_.find(module + ".weight");
    const bool is_head = found.is_copy && !is_prediction_tensor(base_.config, found.name);
    const bool is_end = is_head || found.name == base_.family->names->embedding();
    const bool has_factors = parts.size() > (parts.contains("base_layer") ? 1 : 0);
    if (!base_.config.is_tied() || !is_end || !has_factors) return false;
    if (settings_.ties_weights()) {
      if (is_head) add_tied(module, parts);
      return is_head;
    }
    refuse_one_end(module);
  }

  [[noreturn]] void refuse_one_end(const std::string& module) const {
    throw Error(
        ErrorKind::kLayout,
        fmt::format("{}: {}: the base has one tensor for embedding and output layer, and the "
                    "adapter was trained on one end without the other (ensure_weight_tying)",
                    source_, module),
        "merge it into a base with an output layer of its own: a copy of the embedding as "
        "lm_head.weight, and tie_word_embeddings false in config.json");
  }

  // The factors are those of the embedding, the first for the second.
  void add_tied(const std::string& module, const Parts& parts) {
    const auto embedding = std::ranges::find_if(
        modules_, [](const auto& one) { return one.second.contains("lora_embedding_A"); });
    require(embedding != modules_.end(), ErrorKind::kCorrupt,
            "{}: {}: ensure_weight_tying is set, but the embedding has no factors", source_,
            module);
    for (const auto& [part, other] :
         {std::pair("lora_A", "lora_embedding_B"), std::pair("lora_B", "lora_embedding_A")}) {
      const auto& transposed = factor(embedding->first, embedding->second, other);
      tied_.push_back({.tensor = factor(module, parts, part).name,
                       .other = transposed.name,
                       .transposed = true});
    }
  }

  // A tensor that was trained whole, or rows of one (trainable_token_indices), take the place of
  // the base's: peft/utils/other.py, ModulesToSaveWrapper; tuners/trainable_tokens/layer.py.
  void add_replaced(const AdapterKey& key, const ModelTensor& saved) {
    const bool rows = key.part == kTokenRows;
    const auto found = names_.find(rows ? key.module + ".weight" : key.module);
    if (found.tensor == nullptr) {
      throw Error(ErrorKind::kLayout,
                  fmt::format("{}: the adapter {} changes it, the base has no such tensor",
                              found.name, source_),
                  found.name.starts_with("score.") ? "AutoModelForSequenceClassification or "
                                                     "-TokenClassification makes a base with a "
                                                     "score.weight: save that first"
                                                   : "");
    }
    const auto& tensor = *found.tensor;
    auto shape = tensor.shape;
    const auto tokens = rows ? settings_.token_indices(key.module) : std::vector<std::int64_t>();
    if (rows) shape[0] = std::ssize(tokens);
    require(saved.shape == shape && shape.product() > 0 && distckpt::is_floating_point(saved.dtype),
            ErrorKind::kLayout, "{}: {}: is {} {}, expected {} as of the base", source_, saved.name,
            short_name(saved.dtype), to_string(saved.shape), to_string(shape));
    const bool is_head = found.is_copy && !is_prediction_tensor(base_.config, found.name);
    const bool is_end = is_head || found.name == base_.family->names->embedding();
    // Tokens of the embedding are those of the output layer that is tied to it.
    if (base_.config.is_tied() && is_end && (is_head || !rows)) {
      const auto other = std::ranges::find_if(replaced_, [&](const auto& one) {
        const auto end = names_.find(one.first.module);
        return one.second != &saved && end.tensor == found.tensor;
      });
      const bool both = !rows && other != replaced_.end();
      if (!both && (is_head || !settings_.ties_weights())) refuse_one_end(key.module);
      if (both && is_head) tied_.push_back({.tensor = saved.name, .other = other->second->name});
      if (is_head) return;
    }
    const auto columns = shape.product() / shape[0];
    AdaptedTensor replaced{
        .tensor = tensor.name, .rows = shape[0], .columns = columns, .whole = saved.name};
    if (!rows) return tensors_.push_back(replaced);
    replaced.rows = 1;
    for (const auto token : tokens) {
      require(token >= 0 && token < tensor.shape[0], ErrorKind::kLayout,
              "{}: trainable_token_indices: {}: {} has {} rows", source_, token, tensor.name,
              tensor.shape[0]);
      replaced.first_row = token;
      tensors_.push_back(replaced);
      ++replaced.first_out;
    }
  }

  void add_experts(const std::string& module,
                   const Parts& parts,
                   const ExpertModules::Parameter& parameter) {
    require(!settings_.uses_dora(), ErrorKind::kLayout, "{}: {}: DoRA of experts is not merged",
            source_, module);
    const auto& a = factor(module, parts, "lora_A");
    const auto& b = factor(module, parts, "lora_B");
    require(!parameter.experts.empty(), ErrorKind::kLayout, "{}: {}: the base has no such tensors",
            source_, parameter.name);
    const auto& first = base_.megatron[parameter.experts.front()];
    const auto num_experts = base_.config.num_moe_experts;
    const bool fits = std::ssize(parameter.experts) == num_experts && a.shape[0] > 0 &&
                      a.shape[0] % num_experts == 0 && b.shape[1] == a.shape[0] &&
                      b.shape[0] == first.shape[0] && a.shape[1] == first.shape[1];
    require(fits, ErrorKind::kLayout,
            "{}: {}: the factors {} and {} are not those of {} experts with weights of {}", source_,
            parameter.name, to_string(a.shape), to_string(b.shape), num_experts,
            to_string(first.shape));
    const auto rank = a.shape[0] / num_experts;
    const ExpertFactors factors{
        .a = a.name, .b = b.name, .rank = rank, .scaling = settings_.scaling(parameter.name, rank)};
    for (const auto index : parameter.experts)
      add_expert_changes(base_, base_.megatron[index], factors, tensors_);
    adapted_parameters_.push_back(parameter.name);
  }

  AdaptedTensor adapted_tensor(const std::string& module, const Parts& parts) const {
    AdaptedTensor tensor{.tensor = names_.find(module + ".weight").name};
    Shape base_shape;
    if (const auto base = parts.find("base_layer"); base != parts.end()) {
      require_matrix(*base->second);
      base_shape = base->second->shape;
      tensor.base = base->second->name;
      tensor.rows = base_shape[0];
      tensor.columns = base_shape[1];
      if (parts.size() == 1) return tensor;
    }
    tensor.transposed = parts.contains("lora_embedding_A");
    const std::string prefix = tensor.transposed ? "lora_embedding_" : "lora_";
    const auto& a = factor(module, parts, prefix + "A");
    const auto& b = factor(module, parts, prefix + "B");
    tensor.a = a.name;
    tensor.b = b.name;
    tensor.rank = a.shape[0];
    require(tensor.rank > 0 && b.shape[1] == tensor.rank, ErrorKind::kCorrupt,
            "{}: {}: the factors {} and {} have no common rank", source_, module,
            to_string(a.shape), to_string(b.shape));
    const Shape shape{tensor.transposed ? a.shape[1] : b.shape[0],
                      tensor.transposed ? b.shape[0] : a.shape[1]};
    require(!tensor.base || base_shape == shape, ErrorKind::kCorrupt,
            "{}: {}: the factors change {}, the base's weight is {}", source_, module,
            to_string(shape), to_string(base_shape));
    tensor.rows = shape[0];
    tensor.columns = shape[1];
    tensor.scaling = settings_.scaling(module, tensor.rank);
    const auto magnitude = parts.find("lora_magnitude_vector");
    require((magnitude != parts.end()) == settings_.uses_dora(), ErrorKind::kLayout,
            "{}: {}: use_dora and the presence of its magnitudes contradict each other", source_,
            module);
    if (magnitude == parts.end()) return tensor;
    require(!tensor.transposed, ErrorKind::kLayout,
            "{}: {}: DoRA of an embedding is not handled: its magnitudes are those of columns, "
            "each of which all rows make up",
            source_, module);
    const auto count = magnitude->second->shape.product();
    require(count == tensor.rows, ErrorKind::kLayout,
            "{}: {}: {} magnitudes, expected one for each of {} rows", source_, module, count,
            tensor.rows);
    tensor.magnitude = magnitude->second->name;
    return tensor;
  }

  // Parameters that the settings name are those of experts, or weights of modules.
  void require_named_parameters() const {
    for (const auto& name : settings_.target_parameters()) {
      const bool found = std::ranges::any_of(
          adapted_parameters_, [&](const auto& adapted) { return is_named(adapted, name); });
      require(found, ErrorKind::kLayout,
              "{}: target_parameters: {}: is not merged: the adapter has no factors of such "
              "parameters of the base",
              source_, name);
    }
  }

  const ModelMap& base_;
  BaseNames names_;
  fs::path folder_;
  LoraSettings settings_;
  ExpertModules experts_;
  std::string source_;
  std::map<std::string, Parts> modules_;  // by the adapter's names
  std::vector<std::pair<AdapterKey, const ModelTensor*>> replaced_;
  std::set<std::string> peft_modules_;  // the same, by peft_module()
  std::vector<std::string> adapted_parameters_;
  std::vector<AdaptedTensor> tensors_;
  std::vector<TiedTensors> tied_;
};

}  // namespace

void add_expert_changes(const ModelMap& base,
                        const MegatronTensor& of,
                        const ExpertFactors& factors,
                        std::vector<AdaptedTensor>& tensors) {
  std::int64_t first_out = 0;
  for (const auto model : merged_tensors(of)) {
    const auto& tensor = base.tensors[model];
    const auto part = std::ranges::find(of.parts, model, &MappedPart::model);
    AdaptedTensor adapted{.tensor = tensor.name,
                          .rank = factors.rank,
                          .scaling = factors.scaling,
                          .a = factors.a,
                          .b = factors.b,
                          .expert = *of.expert,
                          .num_experts = base.config.num_moe_experts};
    const int dim = tensor.shape.rank() - 2;  // one before: experts, where a tensor holds all
    adapted.rows = tensor.shape[dim];
    adapted.columns = tensor.shape[dim + 1];
    adapted.transposed = !part->axes.empty() && part->axes[0] > part->axes[1];
    if (dim == 0) {
      adapted.first_out = first_out;
      first_out += adapted.rows;
    } else {
      adapted.first_row = part->model_box.offset[0] * adapted.rows;
    }
    tensors.push_back(std::move(adapted));
  }
}

PeftChanges read_peft_changes(const fs::path& folder, const Checkpoint& base) {
  PeftReader reader(folder, base);
  auto checkpoint = reader.open();
  return {.checkpoint = std::move(checkpoint), .tensors = reader.take(), .tied = reader.tied()};
}

}  // namespace ferry::converter
