#include "trainer/replicas/replica_fleet.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/storage/file_io.h"
#include "models/certificate/numerics_digest.h"
#include "rollout/schedule/sampling_params_json.h"
#include "trainer/metrics/metric_log.h"
#include "trainer/replicas/session_packet.h"

namespace ferry::trainer {

using nlohmann::json;

namespace {

std::filesystem::path file_of(const std::filesystem::path& folder, int rank, const char* suffix) {
  return folder / fmt::format("rank{}.{}", rank, suffix);
}

}  // namespace

ReplicaFleet::ReplicaFleet(const PpoConfig& config,
                           models::GPTModel& model,
                           int rank,
                           const ReplicaDevices& devices)
    : config_(config),
      model_(model),
      rank_(rank),
      devices_(devices),
      folder_(std::filesystem::absolute(config.trainer.run.default_local_dir) / kReplicaFolder),
      journal_(file_of(folder_, rank, "jsonl")),
      listener_(file_of(folder_, rank, "sock")),
      slots_(static_cast<std::size_t>(config.rollout.replicas.num)) {
  distckpt::write_text(file_of(folder_, rank_, "toml"), to_toml(config));
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) start(slot);
}

ReplicaFleet::~ReplicaFleet() = default;

void ReplicaFleet::write(const std::string& event, const nlohmann::ordered_json& more) const {
  nlohmann::ordered_json line{{"time", wall_time()}};
  if (weights_step_) line["step"] = *weights_step_ + 1;
  line["event"] = event;
  line.update(more);
  journal_.append(line.dump(-1, ' ', false, json::error_handler_t::replace) + "\n");
}

void ReplicaFleet::start(std::size_t slot) {
  auto& one = slots_[slot];
  const auto program = fmt::format("/proc/{}/exe", getpid());  // this one, even if replaced
  one.has_joined = false;
  one.started = Clock::now();
  std::vector<std::string> command{program,   "train",
                                   "replica", file_of(folder_, rank_, "sock").string(),
                                   "--slot",  std::to_string(slot)};
  if (config_.trainer.run.device == DeviceKind::kCuda)
    command.insert(command.end(), {"--gpu", std::to_string(devices_.of_slot(slot))});
  one.process = std::make_unique<ChildProcess>(command);
  write("started", {{"slot", slot}});
}

void ReplicaFleet::start_again(std::size_t slot, const std::string& why) {
  auto& one = slots_[slot];
  one.process.reset();  // ends it
  const bool again = one.num_restarts < config_.rollout.replicas.max_restarts;
  if (!again) return write("given up", {{"slot", slot}, {"why", why}});
  ++one.num_restarts;
  try {
    start(slot);
  } catch (const Error& error) {
    write("given up", {{"slot", slot}, {"why", error.what()}});
  }
}

void ReplicaFleet::poll() {
  while (auto socket = listener_.accept())
    replicas_.push_back(std::make_unique<Replica>(
        Replica{.number = num_joined_++, .socket = std::move(*socket), .heard = Clock::now()}));
  for (std::size_t i = 0; i < replicas_.size();) {
    const auto why = listen_to(*replicas_[i]);
    if (why.empty())
      ++i;
    else
      leave_out(i, why);
  }
  const std::chrono::seconds limit(config_.rollout.replicas.start_timeout);
  for (std::size_t slot = 0; slot < slots_.size(); ++slot) {
    auto& one = slots_[slot];
    if (!one.process) continue;
    std::string_view nothing;
    while (one.process->exchange(nothing, std::chrono::milliseconds(0))) {
    }
    if (one.has_joined) continue;  // its socket says when it ends
    if (one.process->ended())
      start_again(slot, fmt::format("ended ({})", *one.process->ended()));
    else if (Clock::now() - one.started > limit)
      start_again(slot, fmt::format("did not join in {} s", limit.count()));
  }
}

std::string ReplicaFleet::listen_to(Replica& replica) {
  const auto& settings = config_.rollout.replicas;
  try {
    while (const auto packet = replica.socket.receive(std::chrono::milliseconds(0)))
      hear(replica, *packet);
  } catch (const std::exception& error) {
    return error.what();
  }
  if (replica.socket.is_closed()) return "ended";
  if (replica.is_loaded && replica.sessions.empty() && replica.has == replica.sent) return "";
  const std::chrono::seconds limit(replica.is_loaded ? settings.timeout : settings.start_timeout);
  if (Clock::now() - replica.heard <= limit) return "";
  return fmt::format("said nothing for {} s", limit.count());
}

void ReplicaFleet::hear(Replica& replica, const json& packet) {
  replica.heard = Clock::now();
  if (packet.contains("joins")) {
    packet.at("pid").get_to(replica.pid);
    if (!packet["joins"].is_null()) {
      const auto slot = packet["joins"].get<std::size_t>();
      require(slot < slots_.size() && slots_[slot].process && !slots_[slot].has_joined,
              ErrorKind::kCorrupt, "joins as slot {}, which waits for nobody", slot);
      replica.slot = slot;
      slots_[slot].has_joined = true;
    }
    replica.socket.send(
        {{"config", file_of(folder_, rank_, "toml").string()},
         {"timeout", config_.rollout.replicas.timeout},
         {"gpu_memory_utilization", devices_.memory_utilization(packet.at("gpu").get<int>())}});
  } else if (packet.contains("loaded")) {
    const auto mine = models::numerics_policy(model_).digest();
    require(packet["loaded"] == mine, ErrorKind::kUsage,
            "computes by another numerical policy than the rank");
    replica.is_loaded = true;
    write("joined", {{"replica", replica.number}, {"pid", replica.pid}});
  } else if (packet.contains("has weights")) {
    replica.has = packet["has weights"].get<std::int64_t>();
  } else if (packet.contains("session")) {
    const auto number = packet.at("number").get<std::size_t>();
    require(sessions_ != nullptr && replica.sessions.contains(number), ErrorKind::kCorrupt,
            "answers session {}, which it does not have", number);
    const auto& session = (*sessions_)[number] = session_of(packet["session"]);
    replica.sessions.erase(number);
    came_back_.push_back(number);
    if (!session.is_over) return queue_.push_back(number);  // it goes on elsewhere
    ++num_over_;
    ++replica.num_answered;
    over_.push_back(number);
  } else if (packet.contains("failed")) {
    fail(ErrorKind::kIo, "{}", packet["failed"].get<std::string>());
  }
}

// One that still takes others gets them when it has those: it holds no more than two images.
void ReplicaFleet::give_weights(Replica& replica) {
  if (!replica.is_loaded || !weights_step_ || replica.sent == weights_step_) return;
  if (replica.has != replica.sent) return;
  if (!image_) image_ = std::make_unique<WeightImage>(model_, config_.rollout.verify_weights);
  replica.socket.send({{"weights", image_->packet()}, {"step", *weights_step_}}, image_->memory());
  replica.sent = weights_step_;
  replica.heard = Clock::now();
}

void ReplicaFleet::give_weights(std::int64_t step) {
  weights_step_ = step;
  image_.reset();
  poll();
  for (const auto& replica : replicas_) give_weights(*replica);
}

void ReplicaFleet::leave_out(std::size_t index, const std::string& why) {
  const auto lost = std::move(replicas_[index]);
  replicas_.erase(replicas_.begin() + static_cast<std::ptrdiff_t>(index));
  queue_.insert(queue_.begin(), lost->sessions.begin(), lost->sessions.end());
  write("left out", {{"replica", lost->number}, {"sessions", lost->sessions.size()}, {"why", why}});
  if (lost->slot) start_again(*lost->slot, why);
}

SessionObserver ReplicaFleet::share(std::vector<Session>& sessions,
                                    const rollout::SamplingParams& params,
                                    SessionObserver observer) {
  sessions_ = &sessions;
  params_ = params;
  observer_ = observer;
  queue_.clear();
  num_mine_ = num_over_ = 0;
  for (std::size_t number = 0; number < sessions.size(); ++number) {
    if (sessions[number].is_over)
      ++num_over_;
    else
      queue_.push_back(number);
  }
  observer.is_over = [this](std::size_t number) {
    --num_mine_;
    ++num_over_;
    observer_.is_over(number);
  };
  observer.next = [this](bool waits) { return next(waits); };
  return observer;
}

void ReplicaFleet::join_run(Replica& replica) {
  replica.socket.send({{"run", params_}, {"global_step", *weights_step_}});
  replica.runs = true;
}

// Each has as many sessions as any other, and no more than its engine computes at a time.
std::vector<std::size_t> ReplicaFleet::hand_out() {
  const auto all = sessions_->size(), sharing = replicas_.size() + 1;
  const auto most = std::min(distckpt::ceil_div(all, sharing),
                             static_cast<std::size_t>(config_.rollout.max_num_seqs));
  for (const auto& replica : replicas_) {
    while (replica->runs && replica->sessions.size() < most && !queue_.empty()) {
      const auto number = queue_.front();
      queue_.pop_front();
      if (replica->sessions.empty()) replica->heard = Clock::now();
      replica->sessions.insert(number);
      replica->socket.send({{"session", to_packet((*sessions_)[number])}, {"number", number}});
    }
  }
  std::vector<std::size_t> mine;
  for (; num_mine_ < most && !queue_.empty(); ++num_mine_) {
    mine.push_back(queue_.front());
    queue_.pop_front();
  }
  return mine;
}

void ReplicaFleet::tell() {
  for (const auto number : std::exchange(over_, {})) observer_.is_over(number);
}

// A replica that has sessions gives them back, each as it stands; one that does not is waited for
// as long as for its answers, and its sessions are as they were handed out.
void ReplicaFleet::recall() {
  if (sessions_ == nullptr) return;
  for (const auto& replica : replicas_)
    if (replica->runs) replica->socket.send({{"stop", true}});
  while (std::ranges::any_of(replicas_, [](const auto& one) { return !one->sessions.empty(); })) {
    poll();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  tell();
  end(nullptr);
}

// `word`: for replicas that have not been told yet.
void ReplicaFleet::end(const char* word) {
  auto answered = nlohmann::ordered_json::object();
  for (const auto& replica : replicas_) {
    if (!std::exchange(replica->runs, false)) continue;
    if (word != nullptr) replica->socket.send({{word, true}});
    answered[std::to_string(replica->number)] = std::exchange(replica->num_answered, 0);
  }
  if (!answered.empty())
    write("answered", {{"sessions", sessions_->size()}, {"of replicas", answered}});
  sessions_ = nullptr;
}

std::optional<std::vector<std::size_t>> ReplicaFleet::next(bool waits) {
  poll();
  tell();
  for (const auto& replica : replicas_) {
    give_weights(*replica);  // to those that have come while others answer
    if (!replica->runs && replica->has && replica->has == weights_step_) join_run(*replica);
  }
  if (num_over_ == sessions_->size()) {
    end("end");
    return std::nullopt;
  }
  auto mine = hand_out();
  if (waits && mine.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return mine;
}

}  // namespace ferry::trainer
