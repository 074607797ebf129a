#include "cli/torch/rollout_flags.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "cli/commands.h"
#include "converter/alignment/model_files.h"
#include "converter/delta/apply_delta.h"
#include "converter/families/hf_config.h"
#include "converter/families/model_map.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "models/certificate/host_threads.h"
#include "models/pipeline_forward.h"
#include "rollout/text/eos_token_ids.h"
#include "rollout/vision/vision_encoder.h"

namespace ferry::cli {
namespace {

using rollout::text::ModelFiles;
using rollout::text::Tokenizer;

std::vector<std::unique_ptr<converter::Delta>> open_delta_chain(
    const std::vector<std::string>& paths) {
  std::vector<std::unique_ptr<converter::Delta>> chain;
  for (const auto& path : paths) {
    for (auto& delta : converter::open_deltas(path)) chain.push_back(std::move(delta));
  }
  for (const auto& delta : chain)
    require(!delta->summary().keep_quantized, ErrorKind::kUsage,
            "{}: is of quantised weights, which the model does not hold; ferry delta apply makes a "
            "checkpoint with it",
            delta->summary().path.string());
  return chain;
}

// Throws Error(kUsage) naming a tensor of the model that the checkpoint lacks, or has of another
// shape.
void require_tensors_of(const models::TransformerConfig& config,
                        const converter::Checkpoint& checkpoint) {
  const auto& theirs = checkpoint.map.config;
  const auto folder = checkpoint.location.folder.string();
  require(theirs.vocab_size == config.vocab_size && theirs.num_layers == config.num_layers &&
              theirs.hidden_size == config.hidden_size,
          ErrorKind::kUsage,
          "{}: is another model: {} layers of {}, vocabulary {}; expected {} of {}, {}", folder,
          theirs.num_layers, theirs.hidden_size, theirs.vocab_size, config.num_layers,
          config.hidden_size, config.vocab_size);
  if (theirs == config) return;
  std::unordered_map<std::string_view, const distckpt::Shape*> shapes;
  for (const auto& tensor : checkpoint.tensors) shapes.emplace(tensor.name, &tensor.shape);
  const auto map = converter::make_model_map(config);
  for (const auto& tensor : map.tensors) {
    if (tensor.role == distckpt::Role::kDerived || map.is_carried(tensor.name)) continue;
    const auto found = shapes.find(tensor.name);
    require(found != shapes.end(), ErrorKind::kUsage, "{}: is another model: it lacks {}", folder,
            tensor.name);
    require(*found->second == tensor.shape, ErrorKind::kUsage,
            "{}: is another model: {} has shape {}, expected {}", folder, tensor.name,
            to_string(*found->second), to_string(tensor.shape));
  }
}

void check_device(const RolloutFlags& flags) {
  const bool on_gpu = flags.mesh.device == "cuda";
  if (flags.gpu_memory_utilization && !on_gpu) {
    throw Error(ErrorKind::kUsage, "--gpu-memory-utilization: has no effect with --device cpu",
                "on the host --kv-cache-memory-bytes is the size of the KV cache");
  }
  if (!flags.kv_cache_memory.empty() && on_gpu) {
    throw Error(ErrorKind::kUsage, "--kv-cache-memory-bytes: has no effect with --device cuda",
                "on a GPU the KV cache takes its share of the memory, --gpu-memory-utilization, or "
                "--num-blocks");
  }
}

std::optional<converter::Checkpoint> open_checkpoint(const RolloutFlags& flags) {
  check_device(flags);
  if (flags.load_format == "dummy") {
    require(!flags.iteration && flags.hf_config.empty(), ErrorKind::kUsage,
            "--iteration and --hf-config: have no effect with --load-format dummy, which reads "
            "CHECKPOINT/config.json alone");
    return std::nullopt;
  }
  return converter::open(flags.checkpoint,
                         {.iteration = flags.iteration, .hf_config = flags.hf_config});
}

ModelFiles model_files(const RolloutFlags& flags,
                       const std::optional<converter::Checkpoint>& checkpoint) {
  using std::filesystem::path;
  if (!flags.tokenizer.empty()) return ModelFiles(path(flags.tokenizer));
  if (!checkpoint) return ModelFiles(path(flags.checkpoint));
  if (!checkpoint->hf)
    return ModelFiles([](const auto&) { return std::nullopt; }, flags.checkpoint);
  const auto read = [form =
                         *checkpoint->hf](const std::string& name) -> std::optional<std::string> {
    if (std::ranges::find(form.carried, name) == form.carried.end()) return std::nullopt;
    return form.text(name);
  };
  return ModelFiles(read, flags.checkpoint);
}

std::unique_ptr<Tokenizer> find_tokenizer(const RolloutFlags& flags, const ModelFiles& files) {
  auto tokenizer = Tokenizer::find_in(files);
  require(tokenizer || flags.tokenizer.empty(), ErrorKind::kNotFound,
          "--tokenizer {}: there is neither a tokenizer.json nor a tiktoken.model",
          flags.tokenizer);
  return tokenizer;
}

}  // namespace

CLI::Validator at_least(double least) {
  return {[least](const std::string& text) {
            double number = 0;
            return CLI::detail::lexical_cast(text, number) && number >= least
                       ? ""
                       : fmt::format("{}: is not a number of {} or more", text, least);
          },
          ""};
}

void add_rollout(CLI::App& command, RolloutFlags& flags) {
  command.add_option("checkpoint", flags.checkpoint, "A checkpoint, in any format")->required();
  add_iteration(command, "--iteration", flags.iteration,
                "Which iteration of a Megatron checkpoint");
  add_hf_config(command, flags.hf_config);
  command
      .add_option("--load-format", flags.load_format,
                  "dummy: random weights of the model that CHECKPOINT/config.json describes")
      ->check(CLI::IsMember({"auto", "dummy"}))
      ->capture_default_str();
  command.add_option("--dtype", flags.dtype, "What the model computes in: bf16 or fp32")
      ->transform(as_dtype({"bf16", "fp32"}))
      ->capture_default_str();
  add_rollout_mesh(command, flags.mesh);
  command
      .add_option("--dp,--data-parallel-size", flags.data_parallel_size,
                  "Engines that share the prompts. Default: as many as the ranks allow")
      ->check(CLI::Range(1, 1 << 16));
  auto& engine = flags.engine;
  command
      .add_option("--max-model-len", engine.max_model_len,
                  "Tokens of a sequence, at most. Default, or 0: as many as the model knows")
      ->check(at_least(0));
  command.add_option("--max-num-seqs", engine.max_num_seqs, "Sequences in one step, at most")
      ->check(at_least(1))
      ->capture_default_str();
  command
      .add_option("--max-num-batched-tokens", engine.max_num_batched_tokens,
                  "Tokens in one step, at most")
      ->check(at_least(1))
      ->capture_default_str();
  auto* const share =
      command
          .add_option(
              "--gpu-memory-utilization", flags.gpu_memory_utilization,
              fmt::format("Share of a GPU's memory, free after the weights, for a step and the KV "
                          "cache. Default: {}",
                          engine.gpu_memory_utilization))
          ->check(CLI::Range(0.01, 1.0));
  auto* const bytes = command.add_option("--kv-cache-memory-bytes", flags.kv_cache_memory,
                                         "Size of the KV cache on the host: 512MiB. Default: 4GiB");
  command
      .add_option("--num-blocks", engine.num_blocks,
                  "Size of the KV cache, in blocks of 64 tokens, on host or GPU. Default, or 0: as "
                  "many as there is memory for")
      ->check(at_least(0))
      ->excludes(share)
      ->excludes(bytes);
  command.add_flag("--no-enable-prefix-caching", flags.no_enable_prefix_caching,
                   "Compute each prompt anew, though others begin alike");
  command.add_flag("--no-enable-chunked-prefill", flags.no_enable_chunked_prefill,
                   "Compute each prompt in one step");
  command.add_flag("--enforce-eager", engine.enforce_eager, "No CUDA graphs");
}

void add_tokenizer(CLI::App& command, RolloutFlags& flags) {
  command.add_option("--tokenizer", flags.tokenizer,
                     "A folder with tokenizer.json or tiktoken.model. Default: the checkpoint's");
}

void add_sampling_shape(CLI::App& command, rollout::SamplingParams& params) {
  const auto number = [&](const char* name, auto& value, const char* what) {
    command.add_option(name, value, what)->capture_default_str()->group("Sampling");
  };
  number("--n", params.n, "Answers to each prompt");
  number("--temperature", params.temperature, "0: greedy, the likeliest token");
  number("--top-k", params.top_k, "Draw from the k likeliest tokens; 0 or -1: from all");
  number("--top-p", params.top_p, "Draw from the likeliest tokens that make up this probability");
  number("--min-p", params.min_p, "Draw from tokens of this share of the largest probability");
  number("--repetition-penalty", params.repetition_penalty,
         "Above 1: against tokens of prompt and answer");
  number("--presence-penalty", params.presence_penalty, "Above 0: against tokens of the answer");
  number("--frequency-penalty", params.frequency_penalty,
         "Above 0: against tokens of the answer, for each time");
}

void add_sampling(CLI::App& command, rollout::SamplingParams& params) {
  const auto add = [&](const char* name, auto& value, const char* what) {
    return command.add_option(name, value, what)->group("Sampling");
  };
  add_sampling_shape(command, params);
  add("--seed", params.seed,
      "The same draws for each prompt and run. Default, or -1: draws of each prompt's id")
      ->transform(CLI::Validator(
          [](std::string& seed) {
            if (seed == "-1") seed.clear();  // no seed, as vLLM has it
            return std::string(seed.starts_with('-') ? "a seed is a whole number from 0 on, or -1"
                                                     : "");
          },
          ""));
  add("--stop", params.stop, "A string that ends an answer, before it; repeatable")
      ->allow_extra_args(false);
  add("--stop-token-ids", params.stop_token_ids, "Tokens that end an answer: 1,2")
      ->delimiter(',')
      ->allow_extra_args(false);
  command.add_flag("--ignore-eos", params.ignore_eos, "Go on behind the end of text")
      ->group("Sampling");
  add("--max-tokens", params.max_tokens, "Tokens of an answer, at most")->capture_default_str();
  add("--min-tokens", params.min_tokens, "Tokens of an answer before it may end")
      ->capture_default_str();
  add("--logprobs", params.logprobs,
      "With --json: also the log-probabilities of so many of the likeliest tokens")
      ->check(at_least(1));
}

void fill_with_dummies(const models::GPTModel& model) {
  const at::NoGradGuard no_grad;
  for (const auto& parameter : model.parameters().all()) {
    const auto& spec = parameter.spec;
    auto value = parameter.value;
    if (spec.global_shape.rank() < 2) {
      value.fill_(spec.key.ends_with("bias") ? 0 : 1);
      continue;
    }
    // Ranks that hold the same part of a tensor hold the same values.
    auto seed = std::hash<std::string>{}(spec.key);
    if (!spec.boxes.empty())
      seed +=
          std::hash<std::string>{}(fmt::format("{}", fmt::join(spec.boxes.front().offset, ",")));
    at::manual_seed(seed);
    value.normal_(0, 0.02);
  }
}

RolloutModel::RolloutModel(models::World& world, const RolloutFlags& flags, std::vector<int> ranks)
    : hf_config_(flags.hf_config),
      checkpoint_(open_checkpoint(flags)),
      mesh_(world, parallel_of(flags.mesh), "rollout", std::move(ranks)),
      files_(model_files(flags, checkpoint_)),
      tokenizer_(find_tokenizer(flags, files_)),
      engine_options_(flags.engine) {
  const int engines = world.size() / mesh_.shape().tp();
  require(flags.data_parallel_size == 0 || flags.data_parallel_size == engines, ErrorKind::kUsage,
          "--dp {}: {} ranks in groups of {} are {} engines", flags.data_parallel_size,
          world.size(), mesh_.shape().tp(), engines);
  const auto config_file = std::filesystem::path(flags.checkpoint) / "config.json";
  const auto config = checkpoint_ ? checkpoint_->map.config
                                  : converter::parse_hf_config(distckpt::read_text(config_file),
                                                               config_file.string());
  require(config.num_moe_experts > 0 || flags.mesh.expert_tensor_parallel_size <= 1,
          ErrorKind::kUsage, "--etp {}: has no effect: the model has no experts",
          flags.mesh.expert_tensor_parallel_size);
  models::choose_host_threads(world, config);
  chunks_ = models::make_stage(
      config, mesh_,
      {.alignment = alignment_of(flags.mesh),
       .dtype = flags.dtype == "fp32" ? distckpt::DType::kF32 : distckpt::DType::kBF16},
      "--tp, --ep");
  if (checkpoint_) {
    seconds_to_load_ = converter::load_model(chunks_, *checkpoint_, {.round = true}).seconds;
  } else {
    fill_with_dummies(model());
  }
  engine_options_.enable_prefix_caching = !flags.no_enable_prefix_caching;
  engine_options_.enable_chunked_prefill = !flags.no_enable_chunked_prefill;
  engine_options_.eos_token_ids = rollout::text::eos_token_ids(files_, tokenizer_.get());
  engine_options_.tokenizer = tokenizer_.get();
  if (const auto reader = image_reader(); reader && checkpoint_)
    engine_options_.vision = std::make_shared<rollout::VisionEncoder>(
        [this] { return load_tower(*checkpoint_, nullptr); }, reader->config);
  if (flags.gpu_memory_utilization)
    engine_options_.gpu_memory_utilization = *flags.gpu_memory_utilization;
  if (!flags.kv_cache_memory.empty())
    engine_options_.kv_cache_bytes = parse_size(flags.kv_cache_memory, "--kv-cache-memory-bytes");
}

std::optional<rollout::ImageReader> RolloutModel::image_reader() const {
  if (!rollout::ModelRunner::sees_images(model()) || tokenizer_ == nullptr) return std::nullopt;
  return rollout::find_image_reader(files_, model().config(), *tokenizer_);
}

std::unique_ptr<models::VisionModel> RolloutModel::load_tower(
    const converter::Checkpoint& checkpoint, converter::Amendment* amendment) const {
  const auto& options = model().options();
  return converter::make_vision_model(model().config(), mesh_, options.dtype, options.alignment,
                                      checkpoint, amendment);
}

void RolloutModel::load_weights(const converter::Checkpoint& checkpoint,
                                converter::Amendment* amendment) const {
  std::unique_ptr<models::VisionModel> tower;
  if (engine_options_.vision && checkpoint.map.config.vision)
    tower = load_tower(checkpoint, amendment);
  converter::load_model(chunks_, checkpoint, {.round = true, .amendment = amendment});
  if (tower) engine_options_.vision->replace(std::move(tower));
}

std::string RolloutModel::family_by_arguments() const {
  return checkpoint_ ? converter::family_by_arguments(*checkpoint_, "--hf-config") : "";
}

std::optional<WeightFiles> RolloutModel::weight_files() const {
  if (!checkpoint_) return std::nullopt;
  return WeightFiles{
      .checkpoint = checkpoint_->location, .hf_config = hf_config_, .files = checkpoint_->files};
}

OpenedWeights RolloutModel::open_weights(const WeightFiles& from) const {
  const auto opened = std::make_shared<converter::Checkpoint>(
      converter::open(from.checkpoint, {.hf_config = from.hf_config}));
  // Digests say it of a delta's base.
  require(!from.deltas.empty() || !from.files || from.files->files() == opened->files->files(),
          ErrorKind::kIo, "{}: is not what it was when it was opened before",
          from.checkpoint.folder.string());
  require_tensors_of(model().config(), *opened);
  OpenedWeights result{.from = from};
  result.from.files = opened->files;
  if (from.deltas.empty()) {
    result.load = [this, opened] { load_weights(*opened, nullptr); };
  } else {
    const auto chain = std::make_shared<converter::DeltaChain>(open_delta_chain(from.deltas));
    chain->begin(*opened);
    result.load = [this, opened, chain] { load_weights(*opened, chain.get()); };
  }
  return result;
}

std::optional<rollout::text::ChatTemplate> RolloutModel::find_chat_template(bool with_tools) const {
  return rollout::text::ChatTemplate::from_files(files_, with_tools);
}

rollout::text::ChatTemplate RolloutModel::chat_template() const {
  auto found = find_chat_template(false);
  require(found.has_value(), ErrorKind::kNotFound, "{}: there is no chat template",
          files_.source());
  return std::move(*found);
}

}  // namespace ferry::cli
