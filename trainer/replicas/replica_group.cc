#include "trainer/replicas/replica_group.h"

#include <utility>

#include "models/device/device.h"
#include "models/distributed/messages.h"
#include "trainer/replicas/session_packet.h"

namespace ferry::trainer {

using nlohmann::json;

ReplicaGroup::ReplicaGroup(models::World& world,
                           const PpoConfig& config,
                           const converter::Checkpoint& origin,
                           const models::ParallelState* mesh,
                           models::GPTModel* model)
    : config_(config), mesh_(mesh), model_(model) {
  const bool is_first = mesh != nullptr && mesh->tp().rank() == 0;
  if (config.rollout.shares_model()) {
    if (is_first) {
      auto alone = config;
      alone.rollout.set_alone();
      first_ranks_ = std::make_unique<models::ParallelState>(
          world, alone.rollout_parallel(), "replicas", first_ranks(config, world.size()));
      whole_ = rollout_model(config, origin, *first_ranks_);
    }
    gather_ = std::make_unique<models::Resharder>(
        world, "replicas",
        model == nullptr ? std::vector<distckpt::LocalShard>() : model->sharded_state_dict(),
        is_first ? whole_.front()->sharded_state_dict() : std::vector<distckpt::LocalShard>(),
        models::ReshardOptions{.bucket_bytes = config.rollout.update_weights_bucket_megabytes
                                               << 20});
  }
  if (is_first)
    fleet_ = std::make_unique<ReplicaFleet>(config, whole_.empty() ? *model : *whole_.front(),
                                            world.rank(),
                                            replica_devices(config, world, models::num_devices()));
}

void ReplicaGroup::give_weights(std::int64_t step) {
  if (gather_) {
    const auto addresses = [](const models::GPTModel* of) {
      return of == nullptr ? std::vector<std::byte*>() : of->parameters().owner_addresses();
    };
    gather_->set_memory(addresses(model_), addresses(whole_.empty() ? nullptr : &*whole_.front()));
    (void)(config_.rollout.verify_weights ? gather_->run_and_verify() : gather_->run());
  }
  if (fleet_) fleet_->give_weights(step);
}

// Sends what the first rank has written into `news` to the others, with the sessions that came back
// from replicas.
void ReplicaGroup::tell(json& news) {
  const auto& tp = mesh_->tp();
  if (fleet_) {
    const auto numbers = fleet_->take_back();
    if (tp.size() == 1) return;
    auto& back = news["back"] = json::array();
    for (const auto number : numbers) back.push_back({number, to_packet((*sessions_)[number])});
  }
  news = models::broadcast(tp, news, 0);
  if (fleet_) return;
  for (const auto& [number, session] :
       news.at("back").get<std::vector<std::pair<std::size_t, json>>>())
    (*sessions_)[number] = session_of(session);
}

SessionObserver ReplicaGroup::share(std::vector<Session>& sessions,
                                    const rollout::SamplingParams& params,
                                    SessionObserver observer) {
  sessions_ = &sessions;
  if (fleet_) observer = fleet_->share(sessions, params, std::move(observer));
  observer.next = [this, next = observer.next](bool waits) {
    json news = json::object();
    if (fleet_)
      if (const auto numbers = next(waits)) news["begin"] = *numbers;
    tell(news);
    return news.contains("begin") ? std::optional(news["begin"].get<std::vector<std::size_t>>())
                                  : std::nullopt;
  };
  return observer;
}

void ReplicaGroup::recall() {
  if (fleet_) fleet_->recall();
  json news = json::object();
  tell(news);
}

}  // namespace ferry::trainer
