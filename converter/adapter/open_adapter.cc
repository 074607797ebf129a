#include "converter/adapter/open_adapter.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "converter/adapter/expert_modules.h"
#include "converter/adapter/lora_settings.h"
#include "converter/families/megatron_links.h"
#include "converter/write/run_config.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::BoxLink;
using distckpt::SafetensorsEntry;

// The factors of a module of PEFT's.
struct FactorEntries {
  const SafetensorsEntry* a = nullptr;
  const SafetensorsEntry* b = nullptr;
};

class PeftOpener {
 public:
  PeftOpener(const fs::path& folder, const ModelMap& base, const OpenAdapterOptions& options)
      : base_(base),
        options_(options),
        settings_(folder / kAdapterConfig),
        weights_(folder / kAdapterWeights),
        source_(weights_.path().string()),
        header_(distckpt::read_safetensors_header(weights_.path())),
        experts_(base) {
    adapter_.config = settings_.text();
    adapter_.checkpoint.location = {.root = folder, .folder = folder};
  }

  Adapter open() {
    index_base();
    group_entries();
    for (const auto& [module, entries] : modules_) take_module(module, entries);
    take_experts();
    take_merged();
    auto& checkpoint = adapter_.checkpoint;
    checkpoint.map = make_adapter_map(base_, adapter_.adapted);
    if (adapter_.experts == ExpertNames::kApart) {
      for (auto& factor : expert_factors(base_, checkpoint.map, adapter_.adapted))
        apart_.emplace(factor.name, std::move(factor));
    }
    for (const auto* entry : kept_) add_kept(*entry);
    checkpoint.tensors = checkpoint.map.tensors;
    distckpt::add_to_layout(header_, adapter_.checkpoint.location.folder, checkpoint.layout);
    for (std::uint32_t i = 0; i < checkpoint.layout.tensors().size(); ++i) link(i);
    return std::move(adapter_);
  }

 private:
  void index_base() {
    for (std::uint32_t i = 0; i < base_.megatron.size(); ++i) {
      const auto& tensor = base_.megatron[i];
      if (tensor.shape.rank() != 2) continue;
      const auto merged = merged_tensors(tensor);
      for (std::size_t part = 0; part < merged.size(); ++part)
        parts_.emplace(factor_prefix(base_.tensors[merged[part]].name), std::pair(i, part));
    }
  }

  void group_entries() {
    for (const auto& entry : header_.entries) {
      const auto key = settings_.parse_key(entry.name, source_);
      if (!key.is_factor()) {
        keep(key, entry);
        continue;
      }
      require(entry.shape.rank() == 2 && distckpt::is_floating_point(entry.dtype),
              ErrorKind::kLayout, "{}: {}: is {} {}, expected a matrix of floating-point numbers",
              source_, entry.name, short_name(entry.dtype), to_string(entry.shape));
      auto& entries = modules_[std::string(kPeftPrefix) + key.module];
      (key.part == "lora_A" ? entries.a : entries.b) = &entry;
    }
    require(!modules_.empty() || !kept_.empty(), ErrorKind::kCorrupt, "{}: changes nothing",
            source_);
    for (const auto& [module, entries] : modules_)
      require(entries.a != nullptr && entries.b != nullptr, ErrorKind::kCorrupt,
              "{}: {}: one of two factors is missing", source_, module);
  }

  // DoRA's magnitudes, what is changed of an embedding, and tensors that were trained whole go
  // along as they are.
  void keep(const AdapterKey& key, const SafetensorsEntry& entry) {
    require(!options_.megatron_tp, ErrorKind::kLayout,
            "{}: {}: is no factor of a linear layer; of an adapter of Megatron-Bridge those alone "
            "are written",
            source_, entry.name);
    kept_.push_back(&entry);
    if (key.part == "lora_magnitude_vector") return;
    const auto name = key.part.empty() ? key.module : key.module + ".weight";
    const auto copy = base_.copies.find(name);
    const auto found = base_.index.find(name);
    const bool is_copy = copy != base_.copies.end();
    require(is_copy || found != base_.index.end(), ErrorKind::kLayout,
            "{}: the adapter {} changes it, the base has no such tensor", name, source_);
    const auto& shape = base_.tensors[is_copy ? copy->second : found->second].shape;
    const bool is_factor = key.part.starts_with("lora_embedding_");
    if (key.part == "lora_embedding_A" && entry.shape.rank() == 2)
      static_cast<void>(settings_.scaling(key.module, entry.shape[0]));  // throws
    const bool fits = !is_factor                                     ? entry.shape == shape
                      : entry.shape.rank() != 2 || shape.rank() != 2 ? false
                      : key.part == "lora_embedding_A"               ? entry.shape[1] == shape[0]
                                                                     : entry.shape[0] == shape[1];
    require(fits, ErrorKind::kLayout, "{}: {}: is {}, the base's is {}", source_, entry.name,
            to_string(entry.shape), to_string(shape));
  }

  static std::string kept_name(const AdapterKey& key, const std::string& name) {
    if (key.part.empty()) return fmt::format("{}{}", kPeftPrefix, key.module);
    return fmt::format("{}{}.{}{}", kPeftPrefix, key.module, key.part,
                       name.ends_with(".weight") ? ".weight" : "");
  }

  void add_kept(const SafetensorsEntry& entry) {
    auto& map = adapter_.checkpoint.map;
    const auto key = settings_.parse_key(entry.name, source_);
    require(key.part != "lora_magnitude_vector" ||
                modules_.contains(std::string(kPeftPrefix) + key.module),
            ErrorKind::kCorrupt, "{}: {}: its factors are missing", source_, entry.name);
    const auto name = kept_name(key, entry.name);
    map.index.emplace(name, static_cast<std::uint32_t>(map.tensors.size()));
    map.tensors.push_back({.name = name, .shape = entry.shape});
  }

  void take_module(const std::string& module, const FactorEntries& entries) {
    if (const auto found = parts_.find(module); found != parts_.end()) {
      const auto [megatron, part] = found->second;
      auto& merged = merged_[megatron];
      merged.resize(merged_tensors(base_.megatron[megatron]).size());
      merged[part] = entries;
      return;
    }
    const auto experts = experts_.find(
        module, settings_, [&](const std::string& other) { return modules_.contains(other); });
    require(experts.has_value(), ErrorKind::kLayout,
            "{}: the adapter {} changes it, the base has no such module",
            module.substr(kPeftPrefix.size()), source_);
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
        const auto found = settings_.scaling(name.substr(0, name.rfind('.')), parts[i].a->shape[0]);
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
      const auto& of = base_.megatron[megatron];
      const auto merged = merged_tensors(of);
      const bool fused = parts.size() == 1 || !adapter_.canonical;
      for (std::size_t i = 0; i < parts.size(); ++i) {
        if (parts[i].a == nullptr || (fused && i > 0)) continue;
        const auto& name = base_.tensors[merged[i]].name;
        take({.megatron = megatron,
              .part = fused ? AdaptedParameter::kFused : static_cast<int>(i),
              .rank = parts[i].a->shape[0],
              .tp = options_.megatron_tp.value_or(1)},
             name.substr(0, name.rfind('.')));
      }
    }
  }

  bool share_first_factor(const std::vector<FactorEntries>& parts) const {
    const auto bytes = [&](const FactorEntries& one) {
      std::vector<std::byte> read(static_cast<std::size_t>(one.a->end - one.a->begin));
      weights_.read_at(one.a->begin, read);
      return read;
    };
    if (std::ranges::any_of(parts, [](const auto& one) { return one.a == nullptr; })) return false;
    const auto first = bytes(parts.front());
    return std::ranges::all_of(parts, [&](const auto& one) {
      return one.a->dtype == parts.front().a->dtype && one.a->shape == parts.front().a->shape &&
             bytes(one) == first;
    });
  }

  void link(std::uint32_t index) {
    auto& checkpoint = adapter_.checkpoint;
    const auto& stored = checkpoint.layout.tensor(index);
    const auto key = settings_.parse_key(stored.name, source_);
    const auto name = key.is_factor()
                          ? fmt::format("{}{}.{}.weight", kPeftPrefix, key.module, key.part)
                          : kept_name(key, stored.name);
    if (const auto apart = apart_.find(name); apart != apart_.end())
      return link_expert(index, apart->second);
    const auto copy = checkpoint.map.copies.find(name);
    const bool is_copy = copy != checkpoint.map.copies.end();
    const auto model = is_copy ? copy->second : checkpoint.map.index.at(name);
    auto& tensor = checkpoint.tensors[model];
    require(tensor.shape == stored.shape, ErrorKind::kLayout,
            "{}: {}: has shape {}, expected {} as the base and the rank say", source_, stored.name,
            to_string(stored.shape), to_string(tensor.shape));
    if (!is_copy) tensor.dtype = stored.dtype;
    auto& made = checkpoint.links.links.emplace_back(BoxLink::whole(model, index, stored.shape));
    if (is_copy) made.copy = ++num_copies_[model];
  }

  void link_expert(std::uint32_t index, const StoredFactor& factor) {
    auto& checkpoint = adapter_.checkpoint;
    const auto& stored = checkpoint.layout.tensor(index);
    require(stored.shape == factor.shape, ErrorKind::kLayout,
            "{}: {}: has shape {}, expected {} as the base and the rank say", source_, stored.name,
            to_string(stored.shape), to_string(factor.shape));
    const auto dtype = dtypes_.emplace(factor.link.model, stored.dtype).first->second;
    require(dtype == stored.dtype, ErrorKind::kLayout, "{}: {}: is {}, that of another expert {}",
            source_, stored.name, short_name(stored.dtype), short_name(dtype));
    checkpoint.tensors[factor.link.model].dtype = dtype;
    checkpoint.links.links.emplace_back(factor.link).stored = index;
  }

  const ModelMap& base_;
  const OpenAdapterOptions& options_;
  LoraSettings settings_;
  distckpt::ReadFile weights_;
  std::string source_;
  distckpt::SafetensorsHeader header_;
  ExpertModules experts_;
  Adapter adapter_;
  std::map<std::string, FactorEntries> modules_;                        // by factor_prefix
  std::map<std::string, std::pair<std::uint32_t, std::size_t>> parts_;  // by factor_prefix
  std::map<std::uint32_t, std::vector<FactorEntries>> merged_;          // by the base's parameter
  std::map<std::string, StoredFactor> apart_;                           // of experts, by name
  std::map<std::uint32_t, distckpt::DType> dtypes_;  // of these, by the adapter's tensor
  std::map<std::uint32_t, int> num_copies_;
  std::vector<const SafetensorsEntry*> kept_;
};

// A number in the section "peft" of run_config.yaml: "  alpha: 32".
std::optional<double> peft_number(const std::string& yaml, std::string_view name) {
  bool inside = false;
  for (std::size_t at = 0; at < yaml.size();) {
    const auto end = std::min(yaml.find('\n', at), yaml.size());
    std::string_view line(yaml.data() + at, end - at);
    at = end + 1;
    if (!line.empty() && line.front() != ' ' && line.front() != '-') inside = line == "peft:";
    const auto start = line.find_first_not_of(' ');
    if (!inside || start != 2) continue;
    line.remove_prefix(start);
    if (!line.starts_with(name) || !line.substr(name.size()).starts_with(": ")) continue;
    line.remove_prefix(name.size() + 2);
    double number = 0;
    const auto [stop, error] = std::from_chars(line.data(), line.data() + line.size(), number);
    if (error == std::errc() && stop == line.data() + line.size()) return number;
  }
  return std::nullopt;
}

class MegatronAdapterOpener {
 public:
  MegatronAdapterOpener(const fs::path& path,
                        const ModelMap& base,
                        const OpenAdapterOptions& options)
      : base_(base), options_(options), location_(locate(path)) {
    require(location_.format == Format::kTorchDist, ErrorKind::kLayout,
            "{}: is {}, expected an adapter of PEFT, or one of Megatron-Bridge in torch_dist",
            path.string(), describe(location_.format));
  }

  Adapter open() {
    const auto stored = distckpt::read_torch_dist(location_.folder);
    std::vector<const distckpt::TorchDistTensor*> factors;
    for (const auto& tensor : stored.tensors) {
      if (is_training_state(tensor.key) || tensor.key.find(".adapter.") == std::string::npos)
        continue;
      factors.push_back(&tensor);
      by_key_.emplace(models::strip_wrappers(tensor.key), &tensor);
    }
    require(!factors.empty(), ErrorKind::kLayout, "{}: holds no factors of an adapter",
            location_.folder.string());
    auto resolved = distckpt::resolve_layout(stored, factors);
    Adapter adapter{.form = AdapterForm::kMegatron};
    auto& checkpoint = adapter.checkpoint;
    checkpoint.location = location_;
    checkpoint.megatron_names = true;
    for (std::uint32_t i = 0; i < base_.megatron.size(); ++i) find_factors(i, adapter);
    checkpoint.map = make_adapter_map(base_, adapter.adapted);
    checkpoint.layout = std::move(resolved.layout);
    checkpoint.checksums = std::move(resolved.checksums);
    checkpoint.links = link_megatron(checkpoint.map, checkpoint.layout, LinkedSide::kSource);
    checkpoint.tensors = checkpoint.map.tensors;
    for (const auto& link : checkpoint.links.links)
      checkpoint.tensors[link.model].dtype = checkpoint.layout.tensor(link.stored).dtype;
    const auto alpha = read_alpha();
    for (const auto& one : adapter.adapted)
      adapter.scaling.push_back(
          lora_scaling(alpha, static_cast<double>(one.rank), location_.folder.string()));
    return adapter;
  }

 private:
  void find_factors(std::uint32_t index, Adapter& adapter) {
    const auto& of = base_.megatron[index];
    if (of.shape.rank() != 2) return;
    if (const auto* in = find(of, "linear_in"))
      adapter.adapted.push_back({.megatron = index, .rank = in->shape[in->shape.rank() - 2]});
    const auto parts = static_cast<int>(merged_tensors(of).size());
    if (parts == 1 || of.expert || of.merge == Merge::kCopy) return;
    for (int part = 0; part < parts; ++part) {
      const auto prefix = canonical_prefix(of, part);
      const auto* in = find(of, prefix + "linear_in");
      const auto* out = find(of, prefix + "linear_out");
      if (in == nullptr || out == nullptr) continue;
      adapter.canonical = true;
      adapter.adapted.push_back({.megatron = index,
                                 .part = part,
                                 .rank = in->shape[in->shape.rank() - 2],
                                 .tp = saving_ranks(of, *out)});
    }
  }

  const distckpt::TorchDistTensor* find(const MegatronTensor& of, const std::string& factor) const {
    for (const auto& key : {of.stacked_key, of.key}) {
      if (key.empty()) continue;
      const auto found = by_key_.find(adapter_key(key, factor));
      if (found != by_key_.end()) return found->second;
    }
    return nullptr;
  }

  // Each rank saved its rows, in two halves where they are of gate or up.
  static int saving_ranks(const MegatronTensor& of, const distckpt::TorchDistTensor& out) {
    const int dim = out.shape.rank() - 2;
    std::set<std::int64_t> offsets;
    for (const auto& chunk : out.chunks) offsets.insert(chunk.box.offset[dim]);
    return std::max(1, static_cast<int>(offsets.size()) / (of.merge == Merge::kGateUp ? 2 : 1));
  }

  double read_alpha() const {
    if (options_.alpha) return *options_.alpha;
    for (const auto& folder : {location_.folder, location_.root}) {
      const auto path = folder / kRunConfig;
      if (!distckpt::source_exists(path)) continue;
      if (const auto alpha = peft_number(distckpt::read_text(path), "alpha")) return *alpha;
    }
    throw Error(
        ErrorKind::kLayout,
        fmt::format("{}: no {} says the adapter's alpha", location_.folder.string(), kRunConfig),
        "name it with --lora-alpha");
  }

  const ModelMap& base_;
  const OpenAdapterOptions& options_;
  Location location_;
  std::map<std::string, const distckpt::TorchDistTensor*, std::less<>> by_key_;
};

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

Adapter open_adapter(const fs::path& path,
                     const ModelMap& base,
                     const OpenAdapterOptions& options) {
  const auto files = std::make_shared<distckpt::SourceFiles>();
  const distckpt::NotedFiles noted(*files);
  const auto has_config = [](const fs::path& folder) {
    return distckpt::source_exists(folder / kAdapterConfig);
  };
  auto adapter = [&] {
    if (has_config(path)) return PeftOpener(path, base, options).open();
    if (!has_config(path / kVerlAdapter)) return MegatronAdapterOpener(path, base, options).open();
    auto found = PeftOpener(path / kVerlAdapter, base, options).open();
    found.form = AdapterForm::kVerl;
    return found;
  }();
  adapter.checkpoint.files = files;
  return adapter;
}

}  // namespace ferry::converter
