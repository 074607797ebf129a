#include "python/binding/options.h"

#include "converter/open/prediction_layers.h"
#include "converter/option_check.h"
#include "distckpt/base/error.h"
#include "distckpt/execute/rendezvous.h"

namespace ferry::python {
namespace {

constexpr std::int64_t kMaxMemory = std::int64_t{192} << 20;

std::optional<converter::Format> format_of(const Options& options) {
  const auto name = options.get<std::string>("to");
  if (name.empty()) return std::nullopt;
  if (name == "hf") return converter::Format::kHuggingFace;
  if (name == "megatron") return converter::Format::kTorchDist;
  require(name == "h5", ErrorKind::kUsage, "to={}: is none of hf, megatron, h5", name);
  return converter::Format::kArchive;
}

std::filesystem::path path_of_bytes(const std::vector<unsigned char>& bytes) {
  return std::string(bytes.begin(), bytes.end());
}

// The value that `parse` makes of a name; nothing where none is given.
template <typename Parse>
auto named(const Options& options, const char* option, const char* known, Parse&& parse) {
  const auto name = options.get<std::string>(option);
  auto value = parse(name);
  require(name.empty() || value, ErrorKind::kUsage, "{}={}: is none of {}", option, name, known);
  return value;
}

converter::AdapterForm adapter_form_of(const Options& options) {
  return named(options, "to", "peft, megatron, verl, vllm, sglang", converter::adapter_form)
      .value_or(converter::AdapterForm::kPeft);
}

converter::DryRun dry_run_of(const Options& options) {
  const auto name = options.get<std::string>("dry_run");
  if (name.empty()) return converter::DryRun::kNo;
  if (name == "plan") return converter::DryRun::kPlan;
  require(name == "read", ErrorKind::kUsage, "dry_run={}: is neither plan nor read", name);
  return converter::DryRun::kRead;
}

}  // namespace

std::filesystem::path Options::path(const char* name) const {
  const auto at = json_.find(name);
  if (at == json_.end() || !at->is_array()) return get<std::string>(name);
  return path_of_bytes(get<std::vector<unsigned char>>(name));
}

std::vector<std::filesystem::path> Options::paths(const char* name) const {
  std::vector<std::filesystem::path> found;
  for (const auto& one : get<std::vector<nlohmann::json>>(name)) {
    require(one.is_string() || one.is_array(), ErrorKind::kUsage, "{}: {} is no path", name,
            one.dump());
    found.push_back(one.is_string() ? std::filesystem::path(one.get<std::string>())
                                    : path_of_bytes(one.get<std::vector<unsigned char>>()));
  }
  return found;
}

int Options::threads() const {
  constexpr int kMost = 1024;
  const auto value = get<int>("threads");
  require(value >= 0 && value <= kMost, ErrorKind::kUsage, "threads={}: is not in 0 ... {}", value,
          kMost);
  return value;
}

std::int64_t Options::bytes(const char* name, std::int64_t fallback, std::int64_t least) const {
  const auto value = get(name, fallback);
  require(value >= least, ErrorKind::kUsage, "{}={}: is less than {}", name, value, least);
  return value;
}

std::optional<distckpt::Iteration> Options::iteration(const char* name) const {
  const auto text = get<std::string>(name);
  if (text.empty()) return std::nullopt;
  const auto iteration = distckpt::parse_iteration(text);
  require(iteration.has_value(), ErrorKind::kUsage, "{}={}: an iteration is a number or release",
          name, text);
  return iteration;
}

std::optional<distckpt::DType> Options::dtype() const {
  const auto name = get<std::string>("dtype");
  if (name.empty()) return std::nullopt;
  const auto dtype = converter::weight_dtype(name);
  require(dtype.has_value(), ErrorKind::kUsage, "dtype={}: is none of bf16, fp16, fp32", name);
  return dtype;
}

converter::Selection Options::selection() const {
  return {.include = get<std::vector<std::string>>("include"),
          .exclude = get<std::vector<std::string>>("exclude")};
}

models::ParallelConfig Options::parallel() const {
  const auto size = [&](const char* name) {
    const auto value = get<int>(name, 1);
    require(value >= 1 && value <= 65536, ErrorKind::kUsage, "{}={}: is not in 1 ... 65536", name,
            value);
    return value;
  };
  models::ParallelConfig parallel{
      .tensor_model_parallel_size = size("tp"),
      .pipeline_model_parallel_size = size("pp"),
      .expert_model_parallel_size = size("ep"),
      .expert_tensor_parallel_size = find<int>("etp"),
      .virtual_pipeline_model_parallel_size = find<int>("vpp"),
      .num_layers_in_first_pipeline_stage = find<int>("num_layers_in_first_pipeline_stage"),
      .num_layers_in_last_pipeline_stage = find<int>("num_layers_in_last_pipeline_stage"),
      .account_for_embedding_in_pipeline_split =
          get<bool>("account_for_embedding_in_pipeline_split"),
      .account_for_loss_in_pipeline_split = get<bool>("account_for_loss_in_pipeline_split"),
      .pipeline_model_parallel_layout = get<std::string>("pipeline_model_parallel_layout"),
      .make_vocab_size_divisible_by = get<int>("make_vocab_size_divisible_by", 128)};
  for (const auto* name : {"etp", "vpp", "make_vocab_size_divisible_by"}) {
    if (find<int>(name)) size(name);
  }
  return parallel;
}

converter::ConvertOptions convert_options(const Options& options) {
  converter::ConvertOptions result{
      .from = options.path("source"),
      .to = options.path("target"),
      .format = format_of(options),
      .iteration = options.iteration(),
      .hf_config = options.path("hf_config"),
      .selection = options.selection(),
      .parallel = options.parallel(),
      .megatron_layout =
          named(options, "megatron_layout", "language-model, megatron-bridge, mbridge, slime",
                converter::megatron_layout),
      .dtype = options.dtype(),
      .keep_quantized = options.get<bool>("keep_quantized"),
      .quantize = named(options, "quantize", "fp8-block, fp8-block-lossless, mxfp4",
                        converter::quantization_method),
      .mtp = named(options, "mtp", "keep, drop, error", converter::prediction_layers)
                 .value_or(converter::PredictionLayers::kKeep),
      .no_save_optim = options.get<bool>("no_save_optim"),
      .max_shard_size = options.find<std::int64_t>("max_shard_size"),
      .threads = options.threads(),
      .max_memory = options.bytes("max_memory", kMaxMemory, 1),
      .dry_run = dry_run_of(options),
      .overwrite = options.get<bool>("overwrite"),
      .resume = options.get<bool>("resume"),
      .follow_symlinks = options.get<bool>("follow_symlinks")};
  require(result.max_shard_size.value_or(1) > 0, ErrorKind::kUsage,
          "max_shard_size={}: expected at least one byte", result.max_shard_size.value_or(0));
  if (options.get<bool>("ranks")) result.job = distckpt::rank_from_environment();
  return result;
}

converter::ConvertAdapterOptions adapter_options(const Options& options) {
  return {.from = options.path("source"),
          .to = options.path("target"),
          .base = options.path("base"),
          .hf_config = options.path("hf_config"),
          .form = adapter_form_of(options),
          .parallel = options.parallel(),
          .alpha = options.find<double>("lora_alpha"),
          .dtype = options.dtype(),
          .threads = options.threads(),
          .max_memory = options.bytes("max_memory", kMaxMemory, 1)};
}

converter::ConvertOptions changed_options(const Options& options) {
  auto result = convert_options(options);
  if (!result.format) result.format = converter::format_like_source(result);
  return result;
}

converter::AdapterToMerge merged_adapter(const Options& options) {
  return {.path = options.path("adapter"),
          .alpha = options.find<double>("lora_alpha"),
          .allow_vanished = options.get<bool>("allow_vanished")};
}

converter::SplitOptions split_options(const Options& options) {
  constexpr std::int64_t kMostRank = 65536;
  const auto rank = options.get<std::int64_t>("rank");
  require(rank >= 1 && rank <= kMostRank, ErrorKind::kUsage, "rank={}: is not in 1 ... {}", rank,
          kMostRank);
  return {.base = options.path("base"),
          .tuned = options.path("tuned"),
          .to = options.path("target"),
          .base_iteration = options.iteration("base_iteration"),
          .tuned_iteration = options.iteration("tuned_iteration"),
          .hf_config = options.path("hf_config"),
          .selection = options.selection(),
          .rank = rank,
          .form = adapter_form_of(options),
          .parallel = options.parallel(),
          .threads = options.threads(),
          .max_memory = options.bytes("max_memory", kMaxMemory, 1)};
}

converter::MakeDeltaOptions make_delta_options(const Options& options) {
  using converter::DeltaTarget;
  const auto form =
      named(options, "to", "ferry, slime, vllm",
            [](const std::string& name) -> std::optional<DeltaTarget> {
              if (name == "ferry") return DeltaTarget::kFerry;
              if (name == "slime") return DeltaTarget::kSlime;
              return name == "vllm" ? std::optional(DeltaTarget::kVllm) : std::nullopt;
            })
          .value_or(DeltaTarget::kFerry);
  const auto version = options.find<std::int64_t>("version");
  constexpr std::int64_t kMostVersion = 999'999;
  require(!version || form == DeltaTarget::kSlime, ErrorKind::kUsage,
          "version: only slime's folders have versions");
  require(!version || (*version >= 1 && *version <= kMostVersion), ErrorKind::kUsage,
          "version={}: is not in 1 ... {}", version.value_or(0), kMostVersion);
  return {.ends = converter::PairOptions{.left = options.path("base"),
                                         .right = options.path("new"),
                                         .left_iteration = options.iteration("base_iteration"),
                                         .right_iteration = options.iteration("new_iteration"),
                                         .hf_config = options.path("hf_config"),
                                         .threads = options.threads(),
                                         .max_memory = options.bytes("max_memory", kMaxMemory, 1)},
          .to = options.path("target"),
          .form = form,
          .version = version};
}

converter::VerifyDeltaOptions verify_delta_options(const Options& options) {
  return {.base = options.path("base"),
          .iteration = options.iteration(),
          .hf_config = options.path("hf_config"),
          .threads = options.threads(),
          .max_memory = options.bytes("max_memory", kMaxMemory, 1)};
}

converter::PairOptions pair_options(const Options& options) {
  return {.left = options.path("left"),
          .right = options.path("right"),
          .left_iteration = options.iteration("left_iteration"),
          .right_iteration = options.iteration("right_iteration"),
          .hf_config = options.path("hf_config"),
          .selection = options.selection(),
          .threads = options.threads(),
          .max_memory = options.bytes("max_memory", kMaxMemory, 1)};
}

converter::DigestOptions digest_options(const Options& options) {
  return {.path = options.path("path"),
          .iteration = options.iteration(),
          .hf_config = options.path("hf_config"),
          .keep_quantized = options.get<bool>("keep_quantized"),
          .files = options.get<bool>("files"),
          .threads = options.threads(),
          .max_memory = options.bytes("max_memory", kMaxMemory, 1)};
}

converter::StreamOptions stream_options(const Options& options) {
  return {.dtype = options.dtype(),
          .threads = options.threads(),
          .max_memory = options.bytes("max_memory", kMaxMemory, 1),
          .read_ahead = options.bytes("read_ahead", std::int64_t{256} << 20, 0)};
}

}  // namespace ferry::python
