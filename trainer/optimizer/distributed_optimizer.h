// Adam with its state shared out over data parallel ranks (ZeRO-1; Megatron-Core
// optimizer/distrib_optimizer.py): a rank has fp32 masters and moments of its shards alone, on its
// device or on the host, updates them, and gives the rounded parameters to the others.
//
// A step whose gradients are not all finite changes nothing but the loss scale, and says where the
// first one was.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "distckpt/plan/sharded_tensor.h"
#include "trainer/optimizer/distributed_data_parallel.h"
#include "trainer/optimizer/grad_scaler.h"
#include "trainer/optimizer/optimizer_param_scheduler.h"

namespace ferry::trainer {

struct OptimizerConfig {
  double adam_beta1 = 0.9;
  double adam_beta2 = 0.999;
  double adam_eps = 1e-8;
  bool decoupled_weight_decay = true;  // AdamW; else L2
  double clip_grad = 1.0;              // greatest norm of the gradient; 0: any
  // Moments are fp32 or bf16 (Megatron-Core's precision-aware optimizer).
  distckpt::DType exp_avg_dtype = distckpt::DType::kF32;
  distckpt::DType exp_avg_sq_dtype = distckpt::DType::kF32;
  // Masters and moments live in pinned memory of the host, whence a step streams them through the
  // device (streamed_adam.h).
  bool offload = false;
  // Given where the loss is scaled, as a model in fp16 needs it.
  std::optional<GradScalerConfig> loss_scale{};
};

struct StepReport {
  bool update_successful = false;
  double grad_norm = 0;  // of the whole model, before clipping, without the loss scale
  std::string
      not_finite{};  // the first parameter, in the order of the model, without a finite gradient
  std::int64_t skipped = 0;  // steps so far
  double loss_scale = 1;     // that this step's gradients had
};

class DistributedOptimizer {
 public:
  // The parameters must have their values, or reload_model_params() be called when they do.
  DistributedOptimizer(DistributedDataParallel& ddp, OptimizerConfig config);

  // Makes fp32 masters of the model's parameters.
  void reload_model_params();

  double loss_scale() const { return scaler_ ? scaler_->scale() : 1.0; }
  void zero_grad() { ddp_.zero_grad(); }
  const OptimizerConfig& config() const { return config_; }
  bool has_bf16_moments() const {
    return config_.exp_avg_dtype != distckpt::DType::kF32 ||
           config_.exp_avg_sq_dtype != distckpt::DType::kF32;
  }
  // After the backward passes of a batch. Called by all ranks of the mesh: sums gradients, clips
  // them, updates the parameters that the rank is to update, and gathers all.
  StepReport step(const ParamGroup& group);

  std::int64_t num_steps() const { return num_steps_; }      // that changed parameters
  std::int64_t num_skipped() const { return num_skipped_; }  // that did not

  // Moments, and masters that are not the parameters themselves.
  std::vector<at::Tensor> own_state() const;
  std::int64_t device_bytes() const;  // of these: 0 where they live on the host

  // Masters and moments, where they lie, as fully_reshardable checkpoints name them,
  // optimizer.state.{param,exp_avg,exp_avg_sq}.<key>: the boxes that make up this rank's shards.
  // Checkpoints have all of them in fp32.
  std::vector<distckpt::LocalShard> sharded_state_dict() const;
  // The parts of its state that are no tensors.
  struct State {
    std::int64_t num_steps = 0;
    std::int64_t num_skipped = 0;
    std::optional<GradScalerState> scaler{};

    bool operator==(const State&) const = default;
  };
  State state() const;
  // After a checkpoint's tensors were loaded into sharded_state_dict(): takes the rest, and rounds
  // the parameters from the masters. Called by all ranks of the mesh.
  void load(const State& state);

 private:
  // This rank's part of a bucket: [elements/ranks] each.
  struct Shard {
    std::size_t buffer = 0;
    std::size_t bucket = 0;
    at::Tensor master{}, exp_avg{}, exp_avg_sq{};
    at::Tensor decays{};  // of each 64 elements
    bool master_is_param = false;
  };

  const Bucket& bucket_of(const Shard& shard) const;
  void allocate_state();
  at::Tensor decays_of(const Shard& shard) const;
  double global_squared_sum() const;
  std::string first_not_finite() const;

  DistributedDataParallel& ddp_;
  OptimizerConfig config_;
  std::vector<Shard> shards_;
  std::optional<DynamicGradScaler> scaler_;
  std::int64_t num_steps_ = 0;
  std::int64_t num_skipped_ = 0;
};

}  // namespace ferry::trainer
