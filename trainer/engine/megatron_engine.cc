#include "trainer/engine/megatron_engine.h"

#include <utility>

#include "converter/alignment/model_files.h"
#include "distckpt/base/error.h"
#include "models/certificate/host_threads.h"
#include "models/device/device.h"
#include "models/device/memory_error.h"
#include "models/pipeline_forward.h"
#include "trainer/engine/run_options.h"
#include "trainer/engine/sft_memory.h"

namespace ferry::trainer {

MegatronEngine::MegatronEngine(models::World& world, MegatronEngineOptions options)
    : options_(std::move(options)),
      world_(world),
      mesh_(world, options_.engine.parallel, options_.name, options_.ranks),
      config_(options_.value_head ? converter::with_value_head(origin().map.config)
                                  : origin().map.config),
      memory_(models::model_memory(
          config_, mesh_.shape(), mesh_.coordinates(), model_options(options_.engine).layout())) {
  require(options_.engine.dtype != distckpt::DType::kF16 || world.device().is_cpu() ||
              !options_.training,
          ErrorKind::kUsage,
          "dtype float16 trains on the host alone: on a GPU it is bfloat16 or float32");
  models::choose_host_threads(world, config_);
  allocate("the parameters", memory_.parameters, 0, [&] {
    owned_chunks_ = models::make_stage(config_, mesh_, model_options(options_.engine));
  });
  for (const auto& chunk : owned_chunks_) chunks_.push_back(chunk.get());
  if (mesh_.shape().pp() > 1) p2p_.emplace(world_, mesh_, options_.name, is_interleaved());
  seconds_to_load_ = models::or_out_of_memory("loading the weights of " + options_.name, "", [&] {
    return converter::load_model(owned_chunks_, origin(),
                                 {.new_head = options_.value_head, .round = true})
        .seconds;
  });
  if (options_.training) {
    auto& training = *options_.training;
    allocate("the gradients", memory_.gradients, memory_.parameters, [&] {
      ddp_ = std::make_unique<DistributedDataParallel>(chunks_, DistributedDataParallelConfig{});
    });
    allocate("masters and moments", memory_.optimizer, memory_.parameters + memory_.gradients, [&] {
      optimizer_ = std::make_unique<DistributedOptimizer>(*ddp_, training.optimizer);
    });
    scheduler_ = std::make_unique<OptimizerParamScheduler>(training.scheduler);
    training.checkpoint.name = options_.name;
    training.checkpoint.origin = options_.origin.get();
    training.checkpoint.hf_config = options_.model.hf_config_path;
    checkpoint_ = std::make_unique<TrainingCheckpoint>(world_, chunks_, *optimizer_, *scheduler_,
                                                       training.checkpoint);
  }
  offload_ = std::make_unique<Offload>(chunks_, ddp_.get(), optimizer_.get());
}

MegatronEngine::~MegatronEngine() = default;

void MegatronEngine::allocate(const char* name,
                              std::int64_t bytes,
                              std::int64_t held,
                              const std::function<void()>& body) const {
  allocating(
      world_.device(), [&] { return model_buffer(name, bytes, held, memory_, mesh_); }, body);
}

Pipeline MegatronEngine::pipeline(bool forward_only) const {
  return {.chunks = chunks_,
          .p2p = p2p_ ? &*p2p_ : nullptr,
          .ddp = forward_only ? nullptr : ddp_.get()};
}

TrainingCheckpoint MegatronEngine::checkpoint_at(const std::filesystem::path& root) const {
  return {world_,
          chunks_,
          *optimizer_,
          *scheduler_,
          {.name = options_.name + "/resumed", .root = root, .origin = options_.origin.get()}};
}

StepReport MegatronEngine::optimizer_step() {
  StepReport report;
  const OffloadFlags resting{.optimizer = options_.engine.optimizer_offload};
  allocate("masters and moments", memory_.optimizer, memory_.parameters + memory_.gradients, [&] {
    offload_->to_device(resting);
    report = optimizer_->step(scheduler_->now());
  });
  offload_->to_host(resting);
  models::synchronize(world_.device());
  return report;
}

}  // namespace ferry::trainer
