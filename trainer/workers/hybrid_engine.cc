#include "trainer/workers/hybrid_engine.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "models/certificate/numerics_digest.h"
#include "models/distributed/messages.h"
#include "models/pipeline_forward.h"

namespace ferry::trainer {

using distckpt::LocalShard;
using models::GPTModel;
using models::NumericsPolicy;

namespace {

// The distinct policies of all ranks that have a model.
std::vector<NumericsPolicy> policies(const models::ProcessGroup& ranks, const GPTModel* mine) {
  const auto my_policy = mine != nullptr ? models::numerics_policy(*mine) : NumericsPolicy();
  std::vector<NumericsPolicy> all;
  for (auto& entries : models::gather(ranks, my_policy.entries)) {
    NumericsPolicy policy{std::move(entries)};
    if (!policy.entries.empty() && std::ranges::find(all, policy) == all.end())
      all.push_back(std::move(policy));
  }
  return all;
}

}  // namespace

HybridEngine::HybridEngine(models::World& world,
                           const std::string& name,
                           std::vector<GPTModel*> actor,
                           Offload* actor_offload,
                           RolloutWorker rollout,
                           HybridEngineOptions options)
    : actor_(std::move(actor)),
      offload_(actor_offload),
      rollout_(rollout),
      options_(options),
      resharder_(
          world, name, models::sharded_state_dict(actor_), rollout_shards(), options.reshard) {
  require((rollout_.model == nullptr) == (rollout_.engine == nullptr), ErrorKind::kBug,
          "a rollout is a model and its engine");
  require(options_.reshard.delta == models::Delta::kOff || options_.sleep_level < 2,
          ErrorKind::kUsage, "deltas are sent to a rollout that keeps its weights: sleep_level {}",
          options_.sleep_level);
  const auto trains = policies(resharder_.ranks(), actor_.empty() ? nullptr : actor_.front());
  for (const auto& generates : policies(resharder_.ranks(), rollout_.model)) {
    for (const auto& one : trains) models::require_same_numerics(one, generates);
  }
  train_mode();
}

std::vector<LocalShard> HybridEngine::rollout_shards() const {
  return rollout_.model == nullptr ? std::vector<LocalShard>()
                                   : rollout_.model->sharded_state_dict();
}

models::ReshardReport HybridEngine::rollout_mode() {
  require(!rolling_, ErrorKind::kBug, "the rollout has the weights already");
  if (offload_ != nullptr) offload_->to_host({.grad = options_.offload.grad});
  if (rollout_.engine != nullptr) rollout_.engine->wake_up();
  resharder_.set_memory(models::owner_addresses(actor_),
                        rollout_.model == nullptr ? std::vector<std::byte*>()
                                                  : rollout_.model->parameters().owner_addresses());
  const auto report = with_context(
      [] { return "resharding the actor's weights into the rollout's"; },
      [&] { return options_.verify ? resharder_.run_and_verify() : resharder_.run(); });
  if (rollout_.engine != nullptr) rollout_.engine->reset_prefix_cache();
  if (offload_ != nullptr) offload_->to_host({.param = options_.offload.param});
  rolling_ = true;
  return report;
}

void HybridEngine::train_mode() {
  require(rolling_, ErrorKind::kBug, "the actor has the device already");
  if (rollout_.engine != nullptr && !actor_.empty() && options_.sleep_level > 0)
    rollout_.engine->sleep(options_.sleep_level);
  if (offload_ != nullptr) offload_->to_device(options_.offload);
  rolling_ = false;
}

}  // namespace ferry::trainer
