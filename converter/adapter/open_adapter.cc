#include "converter/adapter/open_adapter.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "converter/adapter/base_names.h"
#include "converter/adapter/expert_modules.h"
#include "converter/adapter/factors/one_rank.h"
#include "converter/adapter/factors/peft_tensors.h"
#include "distckpt/base/error.h"
#include "distckpt/execute/executor.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::BoxLink;
using distckpt::Digest;
using distckpt::TensorLayout;

constexpr std::string_view kWeightEnd = ".weight";

// The factors of a module of PEFT's.
struct FactorEntries {
  std::string module{};  // by the adapter's name, to which settings refer
  const TensorLayout* a = nullptr;
  const TensorLayout* b = nullptr;
};

class PeftOpener {
 public:
  PeftOpener(PeftTensors stored, const Checkpoint& base, const OpenAdapterOptions& options)
      : base_(base.map),
        names_(base),
        options_(options),
        stored_(std::move(stored)),
        settings_(stored_.settings),
        source_(stored_.source),
        experts_(base_) {
    settings_.refuse("trainable_token_indices");
    adapter_.config = stored_.config;
    adapter_.task_type = stored_.task_type;
    adapter_.checkpoint.location = stored_.location;
  }

  Adapter open() {
    index_base();
    group_entries();
    for (const auto& [module, entries] : modules_) take_module(module, entries);
    take_experts();
    take_merged();
    if (options_.one_rank) raise_to_one_rank(adapter_.adapted, adapter_.scaling);
    auto& checkpoint = adapter_.checkpoint;
    checkpoint.map = make_adapter_map(base_, adapter_.adapted);
    if (adapter_.experts == ExpertNames::kApart) {
      for (auto& factor : expert_factors(base_, checkpoint.map, adapter_.adapted)) {
        const auto module = std::string_view(factor.name).substr(kPeftPrefix.size());
        apart_.emplace(fmt::format("{}{}", peft_module(base_, module), kWeightEnd),
                       std::move(factor));
      }
    }
    for (const auto* entry : kept_) add_kept(*entry);
    checkpoint.tensors = checkpoint.map.tensors;
    checkpoint.layout = std::move(stored_.layout);
    checkpoint.checksums = std::move(stored_.checksums);
    const auto num_stored = static_cast<std::uint32_t>(checkpoint.layout.tensors().size());
    for (std::uint32_t i = 0; i < num_stored; ++i) link(i);
    link_zeros(checkpoint);
    link_replicas(std::move(stored_.replicas), checkpoint.layout, checkpoint.links);
    return std::move(adapter_);
  }

 private:
  void index_base() {
    for (std::uint32_t i = 0; i < base_.megatron.size(); ++i) {
      const auto& tensor = base_.megatron[i];
      if (tensor.shape.rank() != 2) continue;
      const auto merged = merged_tensors(tensor);
      for (std::size_t part = 0; part < merged.size(); ++part)
        parts_.emplace(factor_prefix(base_, base_.tensors[merged[part]].name), std::pair(i, part));
    }
  }

  void group_entries() {
    for (const auto& entry : stored_.layout.tensors()) {
      const auto key = settings_.parse_key(entry.name, source_);
      if (!key.is_factor() || is_tied_head(key)) {
        keep(key, entry);
        continue;
      }
      require(entry.shape.rank() == 2 && distckpt::is_floating_point(entry.dtype),
              ErrorKind::kLayout, "{}: {}: is {} {}, expected a matrix of floating-point numbers",
              source_, entry.name, short_name(entry.dtype), to_string(entry.shape));
      auto& entries = modules_[peft_module(base_, key.module)];
      entries.module = key.module;
      (key.part == "lora_A" ? entries.a : entries.b) = &entry;
    }
    require(!modules_.empty() || !kept_.empty(), ErrorKind::kCorrupt, "{}: changes nothing",
            source_);
    for (const auto& [module, entries] : modules_) require_pair(module, entries);
    const auto magnitudes = std::ranges::count_if(kept_, [&](const auto* entry) {
      return settings_.parse_key(entry->name, source_).part == "lora_magnitude_vector";
    });
    require(!settings_.uses_dora() || magnitudes == std::ssize(modules_), ErrorKind::kLayout,
            "{}: use_dora is set, but {} of {} modules have magnitudes", source_, magnitudes,
            modules_.size());
  }

  void require_pair(const std::string& module, const FactorEntries& entries) const {
    require(entries.a != nullptr && entries.b != nullptr, ErrorKind::kCorrupt,
            "{}: {}: one of two factors is missing", source_, module);
    require(entries.a->shape[0] == entries.b->shape[1], ErrorKind::kCorrupt,
            "{}: {}: the factors {} and {} have no common rank", source_, entries.module,
            to_string(entries.a->shape), to_string(entries.b->shape));
  }

  // True of the output layer of a model that has none but its embedding.
  bool is_tied_head(const AdapterKey& key) const {
    const auto found = names_.find(key.module + std::string(kWeightEnd));
    return base_.config.is_tied() && found.is_copy &&
           !is_prediction_tensor(base_.config, found.name);
  }

  // DoRA's magnitudes, what is changed of an embedding, as an output layer too, and tensors that
  // were trained whole go along as they are.
  void keep(const AdapterKey& key, const TensorLayout& entry) {
    require(!options_.megatron_tp, ErrorKind::kLayout,
            "{}: {}: is no factor of a linear layer of the language model; of an adapter of "
            "Megatron-Bridge those alone are written",
            source_, entry.name);
    kept_.push_back(&entry);
    if (key.part == "lora_magnitude_vector") return;
    const auto name = key.part.empty() ? key.module : key.module + ".weight";
    const auto found = names_.find(name);
    require(found.tensor != nullptr, ErrorKind::kLayout,
            "{}: the adapter {} changes it, the base has no such tensor", name, source_);
    const auto& shape = found.tensor->shape;
    const bool of_embedding = key.part.starts_with("lora_embedding_");
    const bool is_factor = of_embedding || key.is_factor();
    if (key.part == "lora_embedding_A" && entry.shape.rank() == 2)
      static_cast<void>(settings_.scaling(key.module, entry.shape[0]));  // throws
    const bool fits = !is_factor                                     ? entry.shape == shape
                      : entry.shape.rank() != 2 || shape.rank() != 2 ? false
                      : key.part.ends_with("A") ? entry.shape[1] == shape[of_embedding ? 0 : 1]
                                                : entry.shape[0] == shape[of_embedding ? 1 : 0];
    require(fits, ErrorKind::kLayout, "{}: {}: is {}, the base's is {}", source_, entry.name,
            to_string(entry.shape), to_string(shape));
  }

  std::string kept_name(const AdapterKey& key, const std::string& name) const {
    const auto module = peft_module(base_, key.module);
    if (key.part.empty())
      return name.ends_with(kWeightEnd) ? module + std::string(kWeightEnd) : module;
    return fmt::format("{}.{}{}", module, key.part, name.ends_with(kWeightEnd) ? kWeightEnd : "");
  }

  void add_kept(const TensorLayout& entry) {
    auto& map = adapter_.checkpoint.map;
    const auto key = settings_.parse_key(entry.name, source_);
    require(
        key.part != "lora_magnitude_vector" || modules_.contains(peft_module(base_, key.module)),
        ErrorKind::kCorrupt, "{}: {}: its factors are missing", source_, entry.name);
    const auto name = kept_name(key, entry.name);
    map.index.emplace(name, static_cast<std::uint32_t>(map.tensors.size()));
    map.tensors.push_back({.name = name, .shape = entry.shape});
  }

  // Factors of a tower go along as they are.
  bool take_tower(const std::string& module, const FactorEntries& entries) {
    const auto found = names_.find(entries.module + std::string(kWeightEnd));
    if (found.tensor == nullptr || !base_.is_carried(found.name)) return false;
    for (const auto* entry : {entries.a, entries.b})
      keep(settings_.parse_key(entry->name, source_), *entry);
    const auto rank = entries.a->shape[0];
    adapter_.tower.push_back({.prefix = module,
                              .tensor = *found.tensor,
                              .rank = rank,
                              .scaling = settings_.scaling(entries.module, rank)});
    return true;
  }

  void take_module(const std::string& module, const FactorEntries& entries) {
    if (const auto found = parts_.find(module); found != parts_.end()) {
      const auto [megatron, part] = found->second;
      auto& merged = merged_[megatron];
      merged.resize(merged_tensors(base_.megatron[megatron]).size());
      merged[part] = entries;
      return;
    }
    if (take_tower(module, entries)) return;
    const auto experts = experts_.find(
        module, settings_, [&](const std::string& other) { return modules_.contains(other); });
    require(experts.has_value(), ErrorKind::kLayout,
            "{}: the adapter {} changes it, the base has no such module", entries.module, source_);
    const auto rank = entries.a->shape[0] / std::max<std::int64_t>(1, std::ssize(experts->experts));
    for (const auto megatron : experts->experts)
      take({.megatron = megatron, .rank = rank}, experts->name);
  }

  void take(const AdaptedParameter& adapted, const std::string& module) {
    adapter_.adapted.push_back(adapted);
    adapter_.scaling.push_back(settings_.scaling(module, adapted.rank));
  }

  // Experts one by one, whose modules have names of their own.
  void take_experts() {
    for (auto at = merged_.begin(); at != merged_.end();) {
      const auto& [megatron, parts] = *at;
      const auto& of = base_.megatron[megatron];
      if (!of.expert) {
        ++at;
        continue;
      }
      adapter_.experts = ExpertNames::kApart;
      const auto merged = merged_tensors(of);
      std::optional<float> scaling;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const auto& name = base_.tensors[merged[i]].name;
        require(parts[i].a != nullptr, ErrorKind::kLayout,
                "{}: is not adapted by {}, other projections of the expert are", name, source_);
        const auto found = settings_.scaling(parts[i].module, parts[i].a->shape[0]);
        require(scaling.value_or(found) == found, ErrorKind::kLayout,
                "{}: {}: gate has the factor {}, up {}", source_, name, scaling.value_or(0), found);
        scaling = found;
      }
      if (parts.size() > 1 && !share_first_factor(parts)) {
        throw Error(ErrorKind::kLayout,
                    fmt::format("{}: {}: gate and up of an expert have first factors of their own; "
                                "PEFT's target_parameters and Megatron-Bridge have one for both",
                                source_, base_.tensors[merged.front()].name),
                    "vLLM, SGLang and ferry merge read the adapter as it is");
      }
      adapter_.adapted.push_back({.megatron = megatron, .rank = parts.front().a->shape[0]});
      adapter_.scaling.push_back(*scaling);
      at = merged_.erase(at);
    }
    if (adapter_.experts == ExpertNames::kApart) require_all_experts(base_, adapter_.adapted);
  }

  // Query, key and value, or gate and up: fused or with factors of their own.
  void take_merged() {
    const bool to_megatron = options_.megatron_tp.has_value();
    adapter_.canonical = !to_megatron || std::ranges::any_of(merged_, [&](const auto& one) {
      return one.second.size() > 1 && !share_first_factor(one.second);
    });
    for (const auto& [megatron, parts] : merged_) {
      const bool fused = parts.size() == 1 || !adapter_.canonical;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].a == nullptr || (fused && i > 0)) continue;
        take({.megatron = megatron,
              .part = fused ? AdaptedParameter::kFused : static_cast<int>(i),
              .rank = parts[i].a->shape[0],
              .tp = options_.megatron_tp.value_or(1)},
             parts[i].module);
      }
    }
    if (to_megatron) take_missing();
  }

  void take_missing() {
    const auto missing = missing_modules(base_, adapter_.adapted);
    adapter_.adapted.insert(adapter_.adapted.end(), missing.begin(), missing.end());
    // One that has none of its own: where there are several, the form refuses the adapter.
    adapter_.scaling.resize(adapter_.adapted.size(), adapter_.scaling.front());
  }

  bool share_first_factor(const std::vector<FactorEntries>& parts) {
    if (std::ranges::any_of(parts, [](const auto& one) { return one.a == nullptr; })) return false;
    if (digests_.empty()) digest_first_factors();
    const auto& first = *parts.front().a;
    return std::ranges::all_of(parts, [&](const auto& one) {
      return one.a->dtype == first.dtype && one.a->shape == first.shape &&
             digests_.at(one.a->name) == digests_.at(first.name);
    });
  }

  void digest_first_factors() {
    std::vector<distckpt::ModelTensor> tensors;
    distckpt::TensorMap links;
    for (const auto& stored : stored_.layout.tensors()) {
      const auto index = static_cast<std::uint32_t>(tensors.size());
      tensors.push_back({.name = stored.name, .dtype = stored.dtype, .shape = stored.shape});
      links.links.push_back(BoxLink::whole(index, index, stored.shape));
    }
    auto all = distckpt::plan_read(tensors, {.layout = &stored_.layout, .map = &links});
    distckpt::CopyPlan plan;
    for (auto& planned : all.tensors) {
      if (settings_.parse_key(planned.tensor.name, source_).part == "lora_A")
        plan.tensors.push_back(std::move(planned));
    }
    distckpt::FileSource source(stored_.layout.storages());
    const auto read = distckpt::Executor({.threads = 1, .on_compared = {}, .on_read = {}})
                          .submit(plan, source, nullptr)
                          .wait();
    for (std::size_t i = 0; i < plan.tensors.size(); ++i)
      digests_.emplace(plan.tensors[i].tensor.name, read.digests[i]);
  }

  void link(std::uint32_t index) {
    auto& checkpoint = adapter_.checkpoint;
    const auto& stored = checkpoint.layout.tensor(index);
    const auto key = settings_.parse_key(stored.name, source_);
    const auto name = key.is_factor()
                          ? fmt::format("{}.{}.weight", peft_module(base_, key.module), key.part)
                          : kept_name(key, stored.name);
    if (const auto apart = apart_.find(name); apart != apart_.end())
      return link_expert(index, apart->second);
    const auto copy = checkpoint.map.copies.find(name);
    const bool is_copy = copy != checkpoint.map.copies.end();
    const auto model = is_copy ? copy->second : checkpoint.map.index.at(name);
    auto& tensor = checkpoint.tensors[model];
    if (!is_copy) tensor.dtype = stored.dtype;
    auto whole = BoxLink::whole(model, index, tensor.shape);
    if (is_copy) whole.copy = ++num_copies_[model];
    const int dim = key.part == "lora_A" ? 0 : 1;
    const bool together = tensor.name.find(".experts.") != tensor.name.npos;
    link_factor(whole, dim, together ? base_.config.num_moe_experts : 1);
  }

  // Links a whole factor, or, where it has a lower rank than its tensor, what is there and zeros.
  // Each expert's rows of A end in zeros; columns of all experts' B take turns, and end in the
  // zeros of all.
  void link_factor(const BoxLink& whole, int dim, std::int64_t experts) {
    auto& checkpoint = adapter_.checkpoint;
    const auto& stored = checkpoint.layout.tensor(whole.stored);
    const auto expected = whole.stored_box.size;
    auto padded = stored.shape;
    const bool lower = options_.one_rank && padded.rank() == 2 && padded[dim] < expected[dim] &&
                       padded[dim] % experts == 0;
    if (lower) padded[dim] = expected[dim];
    require(padded == expected, ErrorKind::kLayout,
            "{}: {}: has shape {}, expected {} as the base and the rank say", source_, stored.name,
            to_string(stored.shape), to_string(expected));
    if (lower) return link_beside_zeros(checkpoint, whole, dim, dim == 0 ? experts : 1);
    checkpoint.links.links.push_back(whole);
  }

  void link_expert(std::uint32_t index, const StoredFactor& factor) {
    auto& checkpoint = adapter_.checkpoint;
    const auto& stored = checkpoint.layout.tensor(index);
    const auto dtype = dtypes_.emplace(factor.link.model, stored.dtype).first->second;
    require(dtype == stored.dtype, ErrorKind::kLayout, "{}: {}: is {}, that of another expert {}",
            source_, stored.name, short_name(stored.dtype), short_name(dtype));
    checkpoint.tensors[factor.link.model].dtype = dtype;
    auto whole = factor.link;
    whole.stored = index;
    link_factor(whole, factor.link.axes.empty() ? 0 : 1, 1);
  }

  const ModelMap& base_;
  BaseNames names_;
  const OpenAdapterOptions& options_;
  PeftTensors stored_;
  LoraSettings settings_;
  std::string source_;
  ExpertModules experts_;
  Adapter adapter_;
  std::map<std::string, FactorEntries> modules_;                        // by factor_prefix
  std::map<std::string, std::pair<std::uint32_t, std::size_t>> parts_;  // by factor_prefix
  std::map<std::uint32_t, std::vector<FactorEntries>> merged_;          // by the base's parameter
  std::map<std::string, StoredFactor> apart_;                           // of experts, by name
  std::map<std::uint32_t, distckpt::DType> dtypes_;  // of these, by the adapter's tensor
  std::map<std::uint32_t, int> num_copies_;
  std::vector<const TensorLayout*> kept_;
  std::map<std::string, Digest> digests_;  // of first factors, by name, once some were compared
};

// verl keeps the base's weights in huggingface/ and the adapter's in dist_ckpt/ beside it.
Location locate_adapter(const fs::path& path) {
  auto found = locate(path);
  const auto beside = found.folder.parent_path() / "dist_ckpt";
  if (found.folder.filename() == "huggingface" && distckpt::source_exists(beside))
    found = locate(beside);
  require(found.format == Format::kTorchDist || found.format == Format::kFsdp, ErrorKind::kLayout,
          "{}: is {}, expected an adapter of PEFT or verl, or one of Megatron-Bridge in torch_dist",
          path.string(), describe(found.format));
  return found;
}

}  // namespace

std::string_view form_name(AdapterForm form) {
  switch (form) {
    case AdapterForm::kPeft:
      return "PEFT";
    case AdapterForm::kVerl:
      return "verl";
    case AdapterForm::kMegatron:
      return "Megatron-Bridge";
    case AdapterForm::kVllm:
      break;
  }
  return "vLLM, SGLang";
}

std::optional<AdapterForm> adapter_form(std::string_view name) {
  if (name == "peft") return AdapterForm::kPeft;
  if (name == "verl") return AdapterForm::kVerl;
  if (name == "vllm" || name == "sglang") return AdapterForm::kVllm;
  return name == "megatron" ? std::optional(AdapterForm::kMegatron) : std::nullopt;
}

void require_adaptable(const Checkpoint& base) {
  require_megatron_form(base, "adapters of them are neither merged, split off nor converted");
}

Adapter open_adapter(const fs::path& path,
                     const Checkpoint& base,
                     const OpenAdapterOptions& options) {
  require_adaptable(base);
  const auto files = std::make_shared<distckpt::SourceFiles>();
  const distckpt::NotedFiles noted(*files);
  const auto has_config = [](const fs::path& folder) {
    return distckpt::source_exists(folder / kAdapterConfig);
  };
  auto adapter = [&] {
    if (has_config(path)) return PeftOpener(read_peft(path), base, options).open();
    const bool in_folder = has_config(path / kVerlAdapter);
    const auto location = in_folder ? Location{} : locate_adapter(path);
    if (!in_folder && location.format == Format::kTorchDist)
      return open_megatron_adapter(location, base.map, options);
    auto found = PeftOpener(in_folder ? read_peft(path / kVerlAdapter)
                                      : read_ranks(location, base.map, options.alpha),
                            base, options)
                     .open();
    found.form = AdapterForm::kVerl;
    return found;
  }();
  adapter.checkpoint.files = files;
  return adapter;
}

}  // namespace ferry::converter
