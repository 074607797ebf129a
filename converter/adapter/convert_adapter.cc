#include "converter/adapter/convert_adapter.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "converter/adapter/adapter_files.h"
#include "converter/adapter/base_names.h"
#include "converter/adapter/expert_factors.h"
#include "converter/adapter/factors/lora_settings.h"
#include "converter/adapter/target_modules.h"
#include "converter/option_check.h"
#include "converter/write/linked_target.h"
#include "converter/write/megatron_target.h"
#include "converter/write/run_config.h"
#include "converter/write/target_folder.h"
#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::BoxLink;
using distckpt::Digest;

bool writes_megatron(const ConvertAdapterOptions& options) {
  return options.form == AdapterForm::kMegatron;
}

OpenAdapterOptions opening(const ConvertAdapterOptions& options) {
  return {.megatron_tp = writes_megatron(options)
                             ? std::optional(options.parallel.tensor_model_parallel_size)
                             : std::nullopt,
          .one_rank = writes_megatron(options) || options.form == AdapterForm::kVllm,
          .alpha = options.alpha};
}

constexpr distckpt::Iteration kAdapterIteration{.number = 0};

class AdapterConversion {
 public:
  AdapterConversion(Adapter adapter, const Checkpoint& base, const ConvertAdapterOptions& options)
      : options_(options),
        base_(base),
        names_(base),
        adapter_(std::move(adapter)),
        target_(adapter_target(options)) {
    tensors_ = adapter_.checkpoint.tensors;
    if (!options.dtype) return;
    for (auto& tensor : tensors_) {
      require(distckpt::can_cast(tensor.dtype, *options.dtype), ErrorKind::kLayout,
              "{}: {} cannot be cast to {}", tensor.name, short_name(tensor.dtype),
              short_name(*options.dtype));
      tensor.dtype = *options.dtype;
    }
  }

  ConvertAdapterReport run(Publication& place, const ProgressFunction& progress) {
    const auto below = options_.form == AdapterForm::kVerl ? fs::path(kVerlAdapter) : fs::path();
    const auto folder = below.empty() ? place.output() : place.output() / below;
    const auto target = make_target(folder);
    const auto records = make_records();
    auto names = target->files(folder);
    for (auto& name : names) name = below / name;
    for (const auto& [name, _] : records) names.emplace_back(name);
    std::ranges::reverse(names);  // weights before the configuration that makes it an adapter
    place.expect(names);
    fs::create_directories(folder);
    const auto& source = adapter_.checkpoint;
    const auto plan = distckpt::plan_copy(
        tensors_, source.side(), target->side(),
        options_.dtype ? distckpt::Transform::kCast : distckpt::Transform::kCastExact);
    auto& sink = target->open_files([](auto) { return true; });
    const auto copied = execute(source, plan, &sink, "copying", progress);
    target->close_sink();
    for (const auto& [name, text] : records) distckpt::write_text(place.output() / name, text);
    prove(place.output(), copied, progress);
    source.files->require_unchanged();
    base_.files->require_unchanged();
    const auto modes = modes_like({&source, &base_});
    place.publish(modes);
    if (writes_megatron(options_)) {
      place.replace_beside(distckpt::kTracker, distckpt::iteration_text(kAdapterIteration),
                           modes.file);
    }
    return make_report(plan);
  }

 private:
  std::unique_ptr<FileTarget> make_target(const fs::path& folder) const {
    const auto& source = adapter_.checkpoint;
    if (writes_megatron(options_)) {
      require_own_factors(base_.map, adapter_.adapted);
      return make_megatron_target(source, tensors_,
                                  {.parallel = options_.parallel,
                                   .iteration = kAdapterIteration,
                                   .dtype = options_.dtype,
                                   .run_config = false},
                                  folder);
    }
    const auto factors = stored_factors();
    std::vector<distckpt::SafetensorsEntry> entries;
    for (const auto& factor : factors) {
      entries.push_back(
          {.name = factor.name, .dtype = tensors_[factor.link.model].dtype, .shape = factor.shape});
    }
    auto header = distckpt::make_safetensors_header(std::string(kAdapterWeights),
                                                    std::move(entries), {{"format", "pt"}});
    std::map<std::string_view, std::uint32_t> index;
    for (std::uint32_t i = 0; i < header.entries.size(); ++i)
      index.emplace(header.entries[i].name, i);
    distckpt::TensorMap links;
    for (const auto& factor : factors)
      links.links.emplace_back(factor.link).stored = index.at(factor.name);
    return make_linked_target(
        std::move(header), std::move(links),
        {{std::string(kAdapterConfig), peft_config(adapter_, base_.map, names_of_experts())}},
        folder);
  }

  ExpertNames names_of_experts() const {
    return options_.form == AdapterForm::kVllm ? ExpertNames::kApart : ExpertNames::kTogether;
  }

  // The tensors of PEFT's file, or of vLLM's.
  std::vector<StoredFactor> stored_factors() const {
    const auto& source = adapter_.checkpoint;
    std::vector<StoredFactor> factors;
    std::set<std::uint32_t> apart;
    if (options_.form == AdapterForm::kVllm) {
      require_servable(adapter_, base_.map);
      factors = expert_factors(base_.map, source.map, adapter_.adapted);
      for (const auto& factor : factors) apart.insert(factor.link.model);
    }
    std::map<std::uint32_t, int> copies;
    const auto add = [&](const std::string& name, std::uint32_t model) {
      if (apart.contains(model)) return;
      const auto& shape = source.tensors[model].shape;
      auto& added = factors.emplace_back(
          StoredFactor{.name = name, .shape = shape, .link = BoxLink::whole(model, 0, shape)});
      added.link.copy = copies[model]++;
    };
    for (std::uint32_t i = 0; i < source.tensors.size(); ++i)
      add(stored_name(source.tensors[i].name), i);
    for (const auto& [name, of] : source.map.copies) add(stored_name(name), of);
    return factors;
  }

  // vLLM and SGLang name modules as files do.
  std::string stored_name(const std::string& factor) const {
    if (options_.form != AdapterForm::kVllm) return factor;
    const auto end = factor.find(".lora_");
    const auto module = factor.substr(kPeftPrefix.size(), end - kPeftPrefix.size());
    return file_prefix(names_.find(module + ".weight").name) + factor.substr(end);
  }

  // Files that say what the tensors do not.
  std::map<std::string, std::string> make_records() const {
    if (writes_megatron(options_))
      return {{std::string(kRunConfig), run_config(adapter_, base_.map)}};
    if (options_.form == AdapterForm::kVerl)
      return {{std::string(kVerlLoraRecord), verl_record(adapter_)}};
    return {};
  }

  distckpt::ExecuteReport execute(const Checkpoint& source,
                                  const distckpt::CopyPlan& plan,
                                  distckpt::BoxSink* sink,
                                  std::string_view stage,
                                  const ProgressFunction& progress) const {
    const auto bytes = source.source();
    const distckpt::Executor executor(
        {.threads = distckpt::reading_threads(options_.threads, options_.from),
         .max_memory = options_.max_memory,
         .on_compared = {},
         .on_read = {}});
    auto report = wait_reporting(executor.submit(plan, *bytes, sink), stage, progress);
    bytes->verify_checksums();
    return report;
  }

  // The factors are read again from what was written.
  void prove(const fs::path& folder,
             const distckpt::ExecuteReport& copied,
             const ProgressFunction& progress) const {
    const auto written = open_adapter(folder, base_, opening(options_));
    const auto& there = written.checkpoint;
    const auto plan = distckpt::plan_read(there.tensors, there.side());
    const auto digests = execute(there, plan, nullptr, "proving", progress).digests;
    std::map<std::string_view, Digest> found;
    for (std::size_t i = 0; i < there.tensors.size(); ++i)
      found.emplace(there.tensors[i].name, digests[i]);
    const auto& tensors = adapter_.checkpoint.tensors;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const auto at = found.find(tensors[i].name);
      require(at != found.end() && at->second == copied.digests[i], ErrorKind::kCorrupt,
              "{}: what was written is not what was read", tensors[i].name);
    }
    const auto before = scalings(adapter_);
    const auto after = scalings(written);
    require(before == after, ErrorKind::kBug, "the factors of the products have changed");
  }

  // The factors of the products, by the base's parameter, and of the tower by its module.
  using Scalings =
      std::pair<std::map<std::uint32_t, std::set<float>>, std::map<std::string, float>>;
  static Scalings scalings(const Adapter& adapter) {
    std::map<std::uint32_t, std::set<float>> found;
    for (std::size_t i = 0; i < adapter.adapted.size(); ++i)
      found[adapter.adapted[i].megatron].insert(adapter.scaling[i]);
    std::map<std::string, float> of_tower;
    for (const auto& one : adapter.tower) of_tower.emplace(one.prefix, one.scaling);
    return {std::move(found), std::move(of_tower)};
  }

  ConvertAdapterReport make_report(const distckpt::CopyPlan& plan) const {
    const auto& source = adapter_.checkpoint;
    ConvertAdapterReport report{
        .source_form = adapter_.form,
        .target_form = options_.form,
        .source = source.location.folder,
        .target = target_,
        .canonical = adapter_.canonical,
        .num_factors = std::ssize(source.tensors) + std::ssize(source.map.copies),
        .bytes = plan.num_bytes()};
    for (const auto& tensor : source.tensors) report.num_parameters += tensor.shape.product();
    return report;
  }

  const ConvertAdapterOptions& options_;
  const Checkpoint& base_;
  BaseNames names_;
  Adapter adapter_;
  fs::path target_;
  std::vector<distckpt::ModelTensor> tensors_;  // with the dtypes of the target
};

}  // namespace

fs::path adapter_target(const ConvertAdapterOptions& options) {
  const auto target = resolve_target(options.to);
  if (!writes_megatron(options)) {
    require_no_layout(options.parallel, fmt::format("an adapter of {}", form_name(options.form)));
  }
  return writes_megatron(options) ? target / distckpt::iteration_folder(kAdapterIteration) : target;
}

ConvertAdapterReport write_adapter(Adapter adapter,
                                   const Checkpoint& base,
                                   const ConvertAdapterOptions& options,
                                   Publication& target,
                                   const ProgressFunction& progress) {
  return AdapterConversion(std::move(adapter), base, options).run(target, progress);
}

ConvertAdapterReport convert_adapter(const ConvertAdapterOptions& options,
                                     const ProgressFunction& progress) {
  const auto base = open(options.base, {.hf_config = options.hf_config, .without_adapter = true});
  auto adapter = open_adapter(options.from, base, opening(options));
  adapter.checkpoint.files->settle();
  Publication target(adapter_target(options));
  return write_adapter(std::move(adapter), base, options, target, progress);
}

}  // namespace ferry::converter
