// Processes that answer beside a rank of the rollout, with its weights. They come and go: each is
// started by the rank, or joins by itself (`ferry train replica`), is given the weights by the rank
// (WeightImage), and is handed sessions one by one once it says that it has them. One that ends, or
// says nothing for long, is left out: its sessions begin again elsewhere, and the rank starts it
// again, a few times. The rank waits for no replica but for answers to the sessions that it has.
//
// A session's tokens are a function of its seed and the weights, in `bitwise` to the byte: who
// answers changes nothing. RUN/replicas/rank<R>.jsonl has what came about, a line each.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "models/gpt_model.h"
#include "trainer/agents/agent_runner.h"
#include "trainer/agents/session.h"
#include "trainer/config/ppo_config.h"
#include "trainer/metrics/append_file.h"
#include "trainer/replicas/packet_socket.h"
#include "trainer/replicas/replica_devices.h"
#include "trainer/replicas/weight_image.h"
#include "trainer/rewards/child_process.h"

namespace ferry::trainer {

inline constexpr const char* kReplicaFolder = "replicas";  // in that of a run

class ReplicaFleet {
 public:
  // Listens on RUN/replicas/rank<R>.sock, and starts replicas. `model`: of the rank's rollout; it
  // outlives this. Throws Error(kIo), Error(kUsage) if they have no GPU.
  ReplicaFleet(const PpoConfig& config,
               models::GPTModel& model,
               int rank,
               const ReplicaDevices& devices = {});
  ~ReplicaFleet();

  // The model has the weights behind `step`, until it is told again: replicas that are there get
  // them, others when they come.
  void give_weights(std::int64_t step);

  // For AgentRunner::run(): it and the replicas share the sessions, and those of a replica come
  // back into them. `observer`: of all sessions. The sessions outlive the run.
  // Sessions that are over already stay.
  SessionObserver share(std::vector<Session>& sessions,
                        const rollout::SamplingParams& params,
                        SessionObserver observer);
  // A run has ended before its sessions: those of replicas come back as they stand.
  void recall();
  // The sessions that replicas have given back since this was called last.
  std::vector<std::size_t> take_back() { return std::exchange(came_back_, {}); }

 private:
  using Clock = std::chrono::steady_clock;

  // A process that this rank starts.
  struct Slot {
    std::unique_ptr<ChildProcess> process{};  // none: it has failed too often
    Clock::time_point started{};
    int num_restarts = 0;
    bool has_joined = false;
  };
  struct Replica {
    int number = 0;                     // of all that joined
    std::optional<std::size_t> slot{};  // none: it came by itself
    PacketSocket socket;
    bool is_loaded = false;
    bool runs = false;  // takes sessions
    Clock::time_point heard{};
    std::set<std::size_t> sessions{};  // that it has
    std::int64_t num_answered = 0;     // of those that are shared
    std::int64_t pid = 0;
    std::optional<std::int64_t> sent{};  // weights, by their step
    std::optional<std::int64_t> has{};   // what it says
  };

  void start(std::size_t slot);
  void start_again(std::size_t slot, const std::string& why);
  void poll();
  // Returns why it is to be left out, or nothing.
  std::string listen_to(Replica& replica);
  void hear(Replica& replica, const nlohmann::json& packet);
  void give_weights(Replica& replica);
  void join_run(Replica& replica);
  void leave_out(std::size_t replica, const std::string& why);
  std::vector<std::size_t> hand_out();
  std::optional<std::vector<std::size_t>> next(bool waits);
  void tell();
  void end(const char* word);
  void write(const std::string& event, const nlohmann::ordered_json& more) const;

  const PpoConfig& config_;
  models::GPTModel& model_;
  int rank_;
  ReplicaDevices devices_;
  std::filesystem::path folder_;
  AppendFile journal_;
  PacketListener listener_;
  std::vector<Slot> slots_;
  std::vector<std::unique_ptr<Replica>> replicas_;
  int num_joined_ = 0;
  std::optional<std::int64_t> weights_step_{};
  std::unique_ptr<WeightImage> image_{};  // of these weights, once a replica needs it
  // Set while sessions are shared:
  std::vector<Session>* sessions_ = nullptr;
  rollout::SamplingParams params_{};
  SessionObserver observer_{};
  // Sessions whose end the observer was not told of: its errors are the rank's, not a replica's.
  std::vector<std::size_t> over_{};
  std::vector<std::size_t> came_back_{};
  std::deque<std::size_t> queue_;  // that nobody has
  std::size_t num_mine_ = 0;       // that the rank has
  std::size_t num_over_ = 0;
};

}  // namespace ferry::trainer
