#include "trainer/engine/megatron_engine.h"

#include <algorithm>
#include <utility>

#include "converter/alignment/model_files.h"
#include "distckpt/base/error.h"
#include "models/certificate/host_threads.h"
#include "models/device/device.h"
#include "models/device/memory_error.h"
#include "models/pipeline_forward.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/out_of_memory.h"
#include "trainer/engine/run_options.h"
#include "trainer/optimizer/streamed_adam.h"

namespace ferry::trainer {
namespace {

// Throws Error(kUsage) if the model has nothing to balance, and is asked to.
std::unique_ptr<LoadBalancing> load_balancing(const models::TransformerConfig& config,
                                              const models::ParallelState& mesh,
                                              const MegatronEngineOptions& options) {
  const auto balancing = load_balancing_config(options.engine);
  const auto refuse = [&](const char* keys, const char* lacks, const char* hint) {
    throw Error(ErrorKind::kUsage, fmt::format("{}: {} {}", keys, options.model.path, lacks), hint);
  };
  if (config.num_moe_experts == 0 && balancing.has_losses())
    refuse("moe_aux_loss_coeff, moe_z_loss_coeff", "has no experts",
           "leave the losses of routers out: they are of models with experts");
  if (!config.moe_router_enable_expert_bias && balancing.bias_update_rate > 0)
    refuse("moe_router_bias_update_rate", "has no bias of its routers",
           "choose moe_router_load_balancing_type=aux_loss with a moe_aux_loss_coeff instead");
  if (config.num_moe_experts == 0) return nullptr;
  return std::make_unique<LoadBalancing>(config, mesh, balancing);
}

// Throws Error(kUsage) for a setting of parts that the model lacks.
void require_parts(const models::TransformerConfig& config, const MegatronEngineOptions& options) {
  const auto& modules = options.engine.recompute_modules;
  const bool of_experts = std::ranges::any_of(modules, [](const auto module) {
    return module == &models::Recompute::Modules::moe ||
           module == &models::Recompute::Modules::moe_act;
  });
  require(!of_experts || config.num_moe_experts > 0, ErrorKind::kUsage,
          "recompute_modules: {} has no experts, whose parts moe and moe_act are",
          options.model.path);
}

// Throws unless the checkpoint has the tower that is to be trained.
void require_tower(const converter::Checkpoint& origin) {
  const bool there = std::ranges::any_of(
      origin.tensors, [&](const auto& tensor) { return origin.map.is_carried(tensor.name); });
  if (there) return;
  throw Error(ErrorKind::kUsage,
              fmt::format("{}: is a model that sees, without its vision tower",
                          origin.location.folder.string()),
              "train the language model alone with freeze_vision_tower=true");
}

}  // namespace

MegatronEngine::MegatronEngine(models::World& world, MegatronEngineOptions options)
    : options_(std::move(options)),
      world_(world),
      mesh_(world, options_.engine.parallel, name_of(options_.role), options_.ranks),
      config_(options_.value_head ? converter::with_value_head(origin().map.config)
                                  : origin().map.config),
      trains_vision_(options_.training && !options_.engine.freeze_vision_tower &&
                     config_.computes_vision()),
      advice_(options_.memory,
              options_.engine,
              {config_, options_.engine, mesh_.shape(), mesh_.coordinates(), options_.memory.dtypes,
               world.device().is_cpu()},
              options_.training.has_value()) {
  const auto& memory = advice_.memory();
  require_parts(config_, options_);
  require(options_.engine.dtype != distckpt::DType::kF16 || world.device().is_cpu() ||
              !options_.training,
          ErrorKind::kUsage,
          "dtype float16 trains on the host alone: on a GPU it is bfloat16 or float32");
  if (trains_vision_) require_tower(origin());
  auto of_model = model_options(options_.engine);
  of_model.vision_tower = trains_vision_;
  models::choose_host_threads(world, config_);
  allocate("the parameters", memory.parameters, 0, [&] {
    owned_chunks_ = models::make_stage(
        config_, mesh_, of_model,
        fmt::format("{0}.tensor_model_parallel_size, {0}.pipeline_model_parallel_size, "
                    "{0}.expert_model_parallel_size",
                    options_.memory.engine));
  });
  for (const auto& chunk : owned_chunks_) chunks_.push_back(chunk.get());
  if (mesh_.shape().pp() > 1) p2p_.emplace(world_, mesh_, name_of(options_.role), is_interleaved());
  seconds_to_load_ =
      models::or_out_of_memory("loading the weights of " + name_of(options_.role), "", [&] {
        return converter::load_model(owned_chunks_, origin(),
                                     {.new_head = options_.value_head, .round = true})
            .seconds;
      });
  if (options_.training) {
    auto& training = *options_.training;
    allocate("the gradients", memory.gradients, memory.parameters, [&] {
      ddp_ = std::make_unique<DistributedDataParallel>(
          chunks_, DistributedDataParallelConfig{.grad_reduce_in_fp32 =
                                                     options_.engine.grad_reduce_in_fp32});
    });
    const auto make_optimizer = [&] {
      optimizer_ = std::make_unique<DistributedOptimizer>(*ddp_, training.optimizer);
    };
    if (memory.on_host > 0)
      allocating(
          c10::kCPU, [&] { return advice_.of_state_on_host(); }, make_optimizer);
    else
      allocate("masters and moments", memory.optimizer, memory.parameters + memory.gradients,
               make_optimizer);
    scheduler_ = std::make_unique<OptimizerParamScheduler>(training.scheduler);
    balancing_ = load_balancing(config_, mesh_, options_);
    training.checkpoint.name = name_of(options_.role);
    training.checkpoint.origin = options_.origin.get();
    training.checkpoint.hf_config = options_.model.hf_config_path;
    checkpoint_ = std::make_unique<TrainingCheckpoint>(world_, chunks_, *optimizer_, *scheduler_,
                                                       training.checkpoint);
  }
  offload_ = std::make_unique<Offload>(chunks_, ddp_.get());
}

MegatronEngine::~MegatronEngine() = default;

void MegatronEngine::allocate(const char* name,
                              std::int64_t bytes,
                              std::int64_t held,
                              const std::function<void()>& body) const {
  allocating(
      world_.device(), [&] { return advice_.of_model(name, bytes, held); }, body);
}

Pipeline MegatronEngine::pipeline(bool forward_only) const {
  return {
      .chunks = chunks_,
      .p2p = p2p_ ? &*p2p_ : nullptr,
      .ddp = forward_only ? nullptr : ddp_.get(),
      .balancing = forward_only ? nullptr : balancing_.get(),
      .memory = {.batch =
                     [this](auto batches, bool no_grad, const auto& body) {
                       const auto shape = shape_of(batches, mesh_.shape().cp());
                       allocating(
                           world_.device(), [&] { return advice_.of_batch(shape, no_grad); }, body);
                     },
                 .loss =
                     [this](const auto&, const auto& batch, const auto& body) {
                       const auto tokens =
                           (batch.scored().defined() ? batch.scored() : batch.tokens());
                       allocating(
                           world_.device(), [&] { return advice_.of_loss(tokens.size(0)); }, body);
                     }}};
}

TrainingCheckpoint MegatronEngine::checkpoint_at(const std::filesystem::path& root) const {
  return {
      world_,
      chunks_,
      *optimizer_,
      *scheduler_,
      {.name = name_of(options_.role) + "/resumed", .root = root, .origin = options_.origin.get()}};
}

std::unique_ptr<rollout::VisionEncoder> MegatronEngine::make_vision_encoder(
    const rollout::ImageProcessorConfig& config) const {
  if (trains_vision_)
    return std::make_unique<rollout::VisionEncoder>(
        [this] { return rollout::part_of_model(chunks_.front()->vision()); }, config);
  auto encoder = std::make_unique<rollout::VisionEncoder>(
      [this] {
        return converter::make_vision_model(config_, mesh_, options_.engine.dtype,
                                            options_.engine.alignment, origin());
      },
      config);
  if (world_.device().is_cuda()) encoder->load();  // before a rollout takes what is free
  return encoder;
}

StepReport MegatronEngine::optimizer_step() {
  StepReport report;
  const auto& memory = advice_.memory();
  allocate("the update of masters and moments", memory.optimizer,
           memory.parameters + memory.gradients,
           [&] { report = optimizer_->step(scheduler_->now()); });
  if (balancing_) balance_metrics_ = balancing_->finish(chunks_, report.update_successful);
  models::synchronize(world_.device());
  return report;
}

std::int64_t MegatronEngine::group_of_micro_batches() const {
  return is_interleaved() ? mesh_.shape().pp() : 1;
}

std::int64_t MegatronEngine::batch_unit(const MicroBatchSize& size) const {
  const auto groups = mesh_.shape().dp() * group_of_micro_batches();
  return is_interleaved() && !size.use_dynamic_bsz ? groups * size.micro_batch_size_per_gpu.value()
                                                   : groups;
}

std::vector<Partition> MegatronEngine::micro_batches(std::span<const std::int64_t> seqlens,
                                                     const MicroBatchSize& size,
                                                     std::int64_t max_token_len) const {
  if (!size.use_dynamic_bsz)
    return split_micro_batches(seqlens.size(),
                               static_cast<std::size_t>(size.micro_batch_size_per_gpu.value()));
  return rearrange_micro_batches(
             gather_seqlens(mesh_.dp(), seqlens),
             {.max_token_len = max_token_len,
              .num_batches_divided_by = static_cast<std::size_t>(group_of_micro_batches())})
      .at(static_cast<std::size_t>(mesh_.coordinates().dp));
}

void MegatronEngine::save(std::int64_t step, const CallerState& caller, bool in_background) {
  if (!in_background) return void(checkpoint_->save(step, caller));
  allocating(
      c10::kCPU, [&] { return advice_.of_snapshot(); },
      [&] { checkpoint_->save_in_background(step, caller); });
}

}  // namespace ferry::trainer
