// Processes on any machines that share a folder and nothing else: they find each other, wait for
// each other and learn of each other's failure through small files in it. What an earlier run left
// there never counts, nor does a clock.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace ferry::distckpt {

struct RankOfJob {
  int rank = 0;
  int size = 1;
};

// The rank that torchrun (RANK, WORLD_SIZE), mpirun (OMPI_COMM_WORLD_*, PMI_*) or srun
// (SLURM_PROCID of SLURM_STEP_NUM_TASKS) gave this process; alone without any. Throws Error(kUsage)
// for values that are none.
RankOfJob rank_from_environment();

struct RendezvousOptions {
  std::chrono::milliseconds patience = std::chrono::minutes(5);   // for ranks that have not come
  std::chrono::milliseconds notice = std::chrono::seconds(10);    // until `late` is called
  std::chrono::milliseconds silence = std::chrono::minutes(2);    // of one that has
  std::chrono::milliseconds heartbeat = std::chrono::seconds(5);  // how often each is heard
  std::function<void(int rank)> late{};  // once on rank 0, with a rank that has not come
  std::function<bool()> go_on{};         // false: stop waiting, Error(kCancelled)
  std::function<void()> look{};  // called by other ranks while they wait for rank 0's folder
};

class Rendezvous {
 public:
  // Rank 0 made `folder`; the others wait for it. Returns when all have come. `agreement` must be
  // the same text on all of them: Error(kUsage) where it is not.
  Rendezvous(std::filesystem::path folder,
             const RankOfJob& job,
             std::string_view agreement,
             RendezvousOptions options = {});
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;

  // Returns when all ranks have come to it. Throws what another rank failed with, as
  // Error(kCancelled), or names a rank that has fallen silent.
  void barrier(std::string_view name);

  // Rank 0 returns when all have come, the others at once: the last thing that ranks say to each
  // other, after which rank 0 may remove the folder.
  void leave(std::string_view name);

  // Tells the others; they throw at their next barrier.
  void fail(std::string_view message) noexcept;

 private:
  struct Heard {
    std::string beat{};
    std::chrono::steady_clock::time_point at{};
  };

  void meet_as_first(std::string_view agreement);
  void meet_as_other(std::string_view agreement);
  std::vector<int> list_missing() const;
  void beat(const std::stop_token& stop);
  void check_failures() const;
  void check_others(std::string_view waiting_for);
  void pause() const;
  std::filesystem::path session_file(std::string_view name, int rank) const;

  std::filesystem::path folder_;
  RankOfJob job_;
  RendezvousOptions options_;
  std::string session_;
  std::map<int, Heard> heard_;
  std::jthread heart_;
};

}  // namespace ferry::distckpt
