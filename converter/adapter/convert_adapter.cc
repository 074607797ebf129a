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
#include "converter/adapter/lora_settings.h"
#include "converter/option_check.h"
#include "converter/write/hf_target.h"
#include "converter/write/megatron_target.h"
#include "converter/write/run_config.h"
#include "converter/write/target_folder.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/remote_store.h"
#include "distckpt/storage/source_tree.h"
#include "distckpt/storage/work_folder.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::Digest;

bool writes_megatron(const ConvertAdapterOptions& options) {
  return options.form == AdapterForm::kMegatron;
}

OpenAdapterOptions opening(const ConvertAdapterOptions& options) {
  return {.megatron_tp = writes_megatron(options)
                             ? std::optional(options.parallel.tensor_model_parallel_size)
                             : std::nullopt,
          .alpha = options.alpha};
}

constexpr distckpt::Iteration kAdapterIteration{.number = 0};

class AdapterConversion {
 public:
  AdapterConversion(Adapter adapter, const Checkpoint& base, const ConvertAdapterOptions& options)
      : options_(options),
        base_(base),
        adapter_(std::move(adapter)),
        target_(adapter_target(options)) {}

  ConvertAdapterReport run(distckpt::WorkFolder& work, const ProgressFunction& progress) {
    const auto below = options_.form == AdapterForm::kVerl ? fs::path(kVerlAdapter) : fs::path();
    const auto folder = below.empty() ? work.output() : work.output() / below;
    const auto target = make_target(folder);
    const auto records = make_records();
    auto names = target->files(folder);
    for (auto& name : names) name = below / name;
    for (const auto& [name, _] : records) names.emplace_back(name);
    work.expect(names);
    fs::create_directories(folder);
    const auto& source = adapter_.checkpoint;
    const auto plan = distckpt::plan_copy(source.tensors, source.side(), target->side());
    auto& sink = dynamic_cast<FileTarget&>(*target).open_files([](auto) { return true; });
    const auto copied = execute(source, plan, &sink, "copying", progress);
    target->close_sink();
    for (const auto& [name, text] : records) distckpt::write_text(work.output() / name, text);
    prove(work.output(), copied, progress);
    source.files->require_unchanged();
    base_.files->require_unchanged();
    work.publish({}, modes());
    if (writes_megatron(options_)) {
      work.replace_beside(distckpt::kTracker, distckpt::iteration_text(kAdapterIteration),
                          modes().file);
    }
    return make_report(plan);
  }

 private:
  std::unique_ptr<Target> make_target(const fs::path& folder) {
    auto& source = adapter_.checkpoint;
    if (writes_megatron(options_))
      return make_megatron_target(
          source, source.tensors,
          {.parallel = options_.parallel, .iteration = kAdapterIteration, .run_config = false},
          folder);
    auto& form = source.hf.emplace();
    form.carried = {std::string(kAdapterConfig)};
    form.contents.emplace(kAdapterConfig, adapter_.config.empty() ? peft_config(adapter_, base_.map)
                                                                  : adapter_.config);
    std::vector<distckpt::SafetensorsEntry> entries;
    const auto add = [&](const std::string& name, const distckpt::ModelTensor& tensor) {
      entries.push_back({.name = name, .dtype = tensor.dtype, .shape = tensor.shape});
    };
    for (const auto& tensor : source.tensors) add(tensor.name, tensor);
    for (const auto& [name, of] : source.map.copies) add(name, source.tensors[of]);
    form.headers = {distckpt::make_safetensors_header(std::string(kAdapterWeights),
                                                      std::move(entries), {{"format", "pt"}})};
    return make_hf_target(source, source.tensors, std::nullopt, std::nullopt, folder);
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
    const auto written = open_adapter(folder, base_.map, opening(options_));
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
    if (adapter_.scaling.empty()) return;  // of embeddings alone
    require(written.scaling.front() == adapter_.scaling.front(), ErrorKind::kBug,
            "the scaling is {}, it was {}", written.scaling.front(), adapter_.scaling.front());
  }

  distckpt::PublishedModes modes() const {
    distckpt::PublishedModes modes;
    const auto& source = adapter_.checkpoint;
    for (const auto& [path, file] : source.files->files()) modes.file &= file.mode;
    modes.folder &= distckpt::identity_of(source.location.folder).mode;
    return modes;
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
  Adapter adapter_;
  fs::path target_;
};

}  // namespace

fs::path adapter_target(const ConvertAdapterOptions& options) {
  const auto target = resolve_target(options.to);
  require(!distckpt::is_remote(target), ErrorKind::kUsage, "{}: an adapter is written to a folder",
          target.string());
  if (!writes_megatron(options)) {
    require_no_layout(options.parallel,
                      options.form == AdapterForm::kVerl ? "verl's adapter" : "PEFT's adapter");
  }
  return writes_megatron(options) ? target / distckpt::iteration_folder(kAdapterIteration) : target;
}

ConvertAdapterReport write_adapter(Adapter adapter,
                                   const Checkpoint& base,
                                   const ConvertAdapterOptions& options,
                                   distckpt::WorkFolder& work,
                                   const ProgressFunction& progress) {
  return AdapterConversion(std::move(adapter), base, options).run(work, progress);
}

ConvertAdapterReport convert_adapter(const ConvertAdapterOptions& options,
                                     const ProgressFunction& progress) {
  const auto base = open(options.base, {.hf_config = options.hf_config});
  auto adapter = open_adapter(options.from, base.map, opening(options));
  adapter.checkpoint.files->settle();
  distckpt::WorkFolder work(adapter_target(options), /*resume=*/false);
  return write_adapter(std::move(adapter), base, options, work, progress);
}

}  // namespace ferry::converter
