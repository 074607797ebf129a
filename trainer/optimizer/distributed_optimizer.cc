#include "trainer/optimizer/distributed_optimizer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "models/device/host_memory.h"
#include "models/distributed/world.h"
#include "models/tensor_parallel/parameters.h"
#include "trainer/optimizer/first_place.h"
#include "trainer/optimizer/kernels/adam.h"
#include "trainer/optimizer/optimizer_shards.h"
#include "trainer/optimizer/streamed_adam.h"

namespace ferry::trainer {
namespace {

// Megatron-Core optimizer/__init__.py, the default of no_weight_decay_cond.
bool decays(const models::ParameterSpec& spec) {
  return !spec.key.ends_with(".bias") && spec.shape.rank() > 1;
}

}  // namespace

DistributedOptimizer::DistributedOptimizer(DistributedDataParallel& ddp, OptimizerConfig config)
    : ddp_(ddp), config_(config) {
  if (config.loss_scale) scaler_.emplace(*config.loss_scale);
  for (std::size_t buffer = 0; buffer < ddp.buffers().size(); ++buffer) {
    const auto& buckets = ddp.buffers()[buffer].buckets();
    for (std::size_t bucket = 0; bucket < buckets.size(); ++bucket) {
      Shard shard{.buffer = buffer, .bucket = bucket};
      shard.master_is_param = buckets[bucket].param_shard().scalar_type() == at::kFloat;
      shard.decays = decays_of(shard);
      shards_.push_back(std::move(shard));
    }
  }
  allocate_state();
  reload_model_params();
}

// On the host it is one piece of memory, since each pinning takes long.
void DistributedOptimizer::allocate_state() {
  const auto device = ddp_.mesh().world().device();
  at::Tensor memory;
  std::int64_t used = 0;
  const auto take = [&](at::Tensor& tensor, const Shard& shard, at::ScalarType dtype) {
    const auto elements = bucket_of(shard).shard_size();
    const auto bytes = elements * static_cast<std::int64_t>(at::elementSize(dtype));
    if (!config_.offload)
      tensor = at::zeros({elements}, at::TensorOptions(dtype).device(device));
    else if (memory.defined())
      tensor = memory.narrow(0, used, bytes).view(dtype);
    used += bytes;
  };
  const auto take_all = [&] {
    used = 0;
    for (auto& shard : shards_) {
      if (shard.master_is_param)
        shard.master = bucket_of(shard).param_shard();
      else
        take(shard.master, shard, at::kFloat);
      take(shard.exp_avg, shard, models::scalar_type(config_.exp_avg_dtype));
      take(shard.exp_avg_sq, shard, models::scalar_type(config_.exp_avg_sq_dtype));
    }
  };
  take_all();  // of the host it only counts
  if (!config_.offload) return;
  memory = models::host_bytes(used, device);
  take_all();
}

const Bucket& DistributedOptimizer::bucket_of(const Shard& shard) const {
  return ddp_.buffers()[shard.buffer].buckets()[shard.bucket];
}

at::Tensor DistributedOptimizer::decays_of(const Shard& shard) const {
  const auto& bucket = bucket_of(shard);
  auto flags = at::zeros({bucket.shard_size() / kBlock}, at::kByte);
  for (const auto& slot : bucket.slots()) {
    const auto mine = intersect(slot, bucket.shard_begin(), bucket.shard_end());
    if (mine.size <= 0 || !decays(ddp_.spec(shard.buffer, slot))) continue;
    const auto first = (mine.begin - bucket.shard_begin()) / kBlock;
    flags.narrow(0, first, distckpt::ceil_div(mine.size, kBlock)).fill_(1);
  }
  return flags.to(bucket.grads().device());
}

void DistributedOptimizer::reload_model_params() {
  for (auto& shard : shards_) {
    if (shard.master_is_param) continue;
    const auto params = bucket_of(shard).param_shard();
    for_stretches(params.numel(), kStagingElements, [&](std::int64_t begin, std::int64_t size) {
      shard.master.narrow(0, begin, size).copy_(params.narrow(0, begin, size));
    });
  }
}

std::int64_t DistributedOptimizer::device_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& tensor : own_state())
    bytes += config_.offload ? 0 : static_cast<std::int64_t>(tensor.nbytes());
  return bytes;
}

std::vector<at::Tensor> DistributedOptimizer::own_state() const {
  std::vector<at::Tensor> tensors;
  for (const auto& shard : shards_) {
    tensors.insert(tensors.end(), {shard.exp_avg, shard.exp_avg_sq});
    if (!shard.master_is_param) tensors.push_back(shard.master);
  }
  return tensors;
}

StepReport DistributedOptimizer::step(const ParamGroup& group) {
  ddp_.finish_grad_sync();
  StepReport report{.loss_scale = loss_scale()};
  const auto squares = global_squared_sum();
  const bool found_inf = !std::isfinite(squares);
  if (scaler_) scaler_->update(found_inf);
  report.grad_norm = std::sqrt(squares) / report.loss_scale;
  if (found_inf) {
    report.not_finite = first_not_finite();
    report.skipped = ++num_skipped_;
    return report;
  }
  ++num_steps_;
  AdamScalars scalars{.lr = group.lr,
                      .beta1 = config_.adam_beta1,
                      .beta2 = config_.adam_beta2,
                      .eps = config_.adam_eps,
                      .weight_decay = group.weight_decay,
                      .decoupled_weight_decay = config_.decoupled_weight_decay,
                      .step = num_steps_,
                      .grad_scale = 1 / report.loss_scale};
  // Megatron-Core optimizer/clip_grads.py, clip_grad_by_total_norm_fp32.
  const double clip = config_.clip_grad / (report.grad_norm + 1e-6);
  if (config_.clip_grad > 0 && clip < 1) scalars.grad_scale *= clip;
  std::vector<AdamTensors> tensors;
  for (const auto& shard : shards_) {
    const auto& bucket = bucket_of(shard);
    tensors.push_back({.grad = bucket.grad_shard(),
                       .master = shard.master,
                       .exp_avg = shard.exp_avg,
                       .exp_avg_sq = shard.exp_avg_sq,
                       .param = shard.master_is_param ? at::Tensor() : bucket.param_shard(),
                       .decays = shard.decays});
  }
  if (config_.offload)
    streamed_adam_update(tensors, scalars);
  else
    for (const auto& shard : tensors) adam_update(shard, scalars);
  ddp_.sync_params();
  report.update_successful = true;
  report.skipped = num_skipped_;
  return report;
}

// Sums what is counted here, in stretches as long as they come; then all ranks', in their order.
double DistributedOptimizer::global_squared_sum() const {
  const auto device = ddp_.mesh().world().device();
  std::vector<at::Tensor> sums{
      at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(device))};
  for (const auto& shard : shards_) {
    const auto& bucket = bucket_of(shard);
    std::int64_t begin = -1;
    std::int64_t end = 0;
    const auto close = [&] {
      if (begin >= 0)
        sums.push_back(
            squared_sum(ddp_.buffers()[shard.buffer].grads().narrow(0, begin, end - begin)));
      begin = -1;
    };
    for (const auto& slot : bucket.slots()) {
      const auto mine = intersect(slot, bucket.shard_begin(), bucket.shard_end());
      if (mine.size <= 0) continue;
      if (!ddp_.is_counted_here(shard.buffer, slot)) {
        close();
        continue;
      }
      if (begin < 0) begin = mine.begin;
      end = mine.begin + mine.size;  // what lies between slots is zero
    }
    close();
  }
  const auto all = ddp_.mesh().all().all_gather(at::cat(sums).sum(0, /*keepdim=*/true)).cpu();
  const auto* const of_rank = all.const_data_ptr<double>();
  double sum = 0;
  for (std::int64_t rank = 0; rank < all.numel(); ++rank) sum += of_rank[rank];
  return sum;
}

std::string DistributedOptimizer::first_not_finite() const {
  const auto& mesh = ddp_.mesh();
  std::string first;
  for (const auto& shard : shards_) {
    const auto& bucket = bucket_of(shard);
    const auto& buffer = ddp_.buffers()[shard.buffer];
    const auto& leaves = buffer.parameters().leaves();
    for (const auto& slot : bucket.slots()) {
      const auto mine = intersect(slot, bucket.shard_begin(), bucket.shard_end());
      if (mine.size <= 0) continue;
      const auto finite = buffer.grads().narrow(0, mine.begin, mine.size).isfinite();
      if (finite.all().item<bool>()) continue;
      const auto at = finite.logical_not().to(at::kByte).argmax().item<std::int64_t>();
      const auto& of = leaves[slot.leaf].parameters;
      const auto of_each = slot.size / static_cast<std::int64_t>(of.size());
      const auto parameter = of[static_cast<std::size_t>((mine.begin - slot.begin + at) / of_each)];
      const auto stage = ddp_.chunk_of(shard.buffer) * static_cast<std::size_t>(mesh.shape().pp()) +
                         static_cast<std::size_t>(mesh.coordinates().pp);
      keep_first(first, fmt::format("{:08}/{:08}/{}", stage, parameter,
                                    buffer.parameters().all()[parameter].spec.key));
    }
  }
  return first_name(mesh.all(), std::move(first));
}

std::vector<distckpt::LocalShard> DistributedOptimizer::sharded_state_dict() const {
  std::vector<distckpt::LocalShard> shards;
  for (const auto& shard : shards_) {
    const auto& bucket = bucket_of(shard);
    const auto& parameters = ddp_.buffers()[shard.buffer].parameters();
    for (const auto& slot : bucket.slots()) {
      const auto mine = intersect(slot, bucket.shard_begin(), bucket.shard_end());
      if (mine.size <= 0) continue;
      const auto add = [&](const char* kind, const at::Tensor& state) {
        auto parts =
            shards_of_range(parameters, parameters.leaves()[slot.leaf], mine.begin - slot.begin,
                            fmt::format("optimizer.state.{}.", kind),
                            state.narrow(0, mine.begin - bucket.shard_begin(), mine.size));
        std::ranges::move(parts, std::back_inserter(shards));
      };
      add("param", shard.master);
      add("exp_avg", shard.exp_avg);
      add("exp_avg_sq", shard.exp_avg_sq);
    }
  }
  return shards;
}

DistributedOptimizer::State DistributedOptimizer::state() const {
  State state{.num_steps = num_steps_, .num_skipped = num_skipped_};
  if (scaler_) state.scaler = scaler_->state();
  return state;
}

void DistributedOptimizer::load(const State& state) {
  num_steps_ = state.num_steps;
  num_skipped_ = state.num_skipped;
  if (scaler_ && state.scaler) scaler_->load(*state.scaler);
  for (auto& shard : shards_) {
    if (shard.master_is_param) continue;
    const auto params = bucket_of(shard).param_shard();
    for_stretches(params.numel(), kStagingElements, [&](std::int64_t begin, std::int64_t size) {
      params.narrow(0, begin, size).copy_(shard.master.narrow(0, begin, size).to(params.device()));
    });
  }
  ddp_.sync_params();
}

}  // namespace ferry::trainer
