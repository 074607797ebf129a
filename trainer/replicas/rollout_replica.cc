#include "trainer/replicas/rollout_replica.h"

#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "models/certificate/numerics_digest.h"
#include "models/device/device.h"
#include "rollout/schedule/sampling_params_json.h"
#include "trainer/agents/tools.h"
#include "trainer/config/ppo_config.h"
#include "trainer/engine/run_options.h"
#include "trainer/replicas/packet_socket.h"
#include "trainer/replicas/rollout_engine.h"
#include "trainer/replicas/session_packet.h"
#include "trainer/replicas/weight_image.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kLong(1);

// Nothing once the rank has gone.
std::optional<json> next_packet(PacketSocket& socket) {
  while (!socket.is_closed())
    if (auto packet = socket.receive(kLong)) return packet;
  return std::nullopt;
}

// Sessions that come one by one, until the rank says that no more do, or wants them back.
class ReplicaRun {
 public:
  // Tells the rank that it is alive now and then.
  ReplicaRun(PacketSocket& socket, std::chrono::milliseconds sign) : socket_(socket), sign_(sign) {}

  void run(AgentRunner& agents, const json& begin) {
    SessionObserver observer;
    observer.is_over = [this](std::size_t at) { give_back(at); };
    observer.poll = [this] { show_life(); };
    observer.next = [this](bool waits) { return next(waits); };
    agents.run(sessions_, begin.at("run").get<rollout::SamplingParams>(), begin.at("global_step"),
               observer, [this] { return stops_; });
    for (std::size_t at = 0; at < sessions_.size(); ++at)
      if (!sessions_[at].is_over) give_back(at);
  }

 private:
  void give_back(std::size_t at) {
    socket_.send({{"session", to_packet(sessions_[at])}, {"number", numbers_[at]}});
  }

  void show_life() {
    if (Clock::now() - shown_ < sign_) return;
    shown_ = Clock::now();
    socket_.send({{"alive", true}});
  }

  std::optional<std::vector<std::size_t>> next(bool waits) {
    std::vector<std::size_t> begun;
    while (true) {
      const auto packet =
          socket_.receive(std::chrono::milliseconds(waits && begun.empty() ? 20 : 0));
      require(!socket_.is_closed(), ErrorKind::kIo, "the rank has gone");
      if (!packet) return begun;
      if (packet->contains("end")) return std::nullopt;
      stops_ = packet->contains("stop");
      if (stops_) return std::nullopt;
      begun.push_back(sessions_.size());
      sessions_.push_back(session_of(packet->at("session")));
      numbers_.push_back(packet->at("number"));
    }
  }

  PacketSocket& socket_;
  std::chrono::milliseconds sign_;
  Clock::time_point shown_{};
  std::vector<Session> sessions_;
  std::vector<std::size_t> numbers_;  // of the rank
  bool stops_ = false;
};

void serve_rank(PacketSocket& socket, std::optional<int> gpu) {
  const auto hello = next_packet(socket);
  if (!hello) return;
  const std::chrono::milliseconds timeout(1000 * hello->at("timeout").get<std::int64_t>());
  auto config = load_ppo_config("ppo", hello->at("config").get<std::string>(), {});
  config.rollout.set_alone();
  config.rollout.gpu_memory_utilization = hello->at("gpu_memory_utilization").get<double>();
  auto options = world_options(config.trainer.run);
  require(options.device.is_cuda() || !gpu, ErrorKind::kUsage,
          "--gpu {}: has no effect: trainer.device of the run is cpu", gpu.value_or(0));
  if (options.device.is_cuda())
    options.device.set_index(static_cast<c10::DeviceIndex>(gpu.value_or(0)));
  models::set_device(options.device);
  models::World world(options);
  const auto origin = open_checkpoint(config.model);
  const auto tools = shared_tools(config.rollout.agents, world);
  const PromptEncoder encoder(tokenizer_folder(config.model, *origin), config.data, tools.schemas,
                              origin->map.config);
  const models::ParallelState mesh(world, config.rollout_parallel(), "replica");
  const auto rollout = make_rollout(world, mesh, config, *origin, encoder, tools, nullptr);
  socket.send({{"loaded", models::numerics_policy(*rollout.model).digest()}});
  while (const auto packet = next_packet(socket)) {
    if (packet->contains("weights")) {
      rollout.engine->reset_prefix_cache();  // waits for a step that a GPU still computes
      read_weights(packet->at("weights"), socket.take_file(), *rollout.model);
      socket.send({{"has weights", packet->at("step")}});
    } else if (packet->contains("run")) {
      ReplicaRun(socket, timeout / 4).run(*rollout.agents, *packet);
    }
  }
}

}  // namespace

void run_replica(const std::filesystem::path& path,
                 std::optional<std::size_t> slot,
                 std::optional<int> gpu) {
  auto socket = PacketSocket::connect(path);
  socket.send(
      {{"joins", slot ? json(*slot) : json()}, {"pid", getpid()}, {"gpu", gpu.value_or(0)}});
  try {
    serve_rank(socket, gpu);
  } catch (const std::exception& error) {
    if (socket.is_closed()) return;
    socket.send({{"failed", error.what()}});
    throw;
  }
}

}  // namespace ferry::trainer
