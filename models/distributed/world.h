// All ranks of a run, as torchrun, srun or mpirun started them, or as threads of one process in
// tests. Meshes are made from it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace c10d {
class Store;
}

namespace ferry::models {

class World {
 public:
  struct Options {
    at::Device device = at::kCPU;
    std::chrono::milliseconds timeout = std::chrono::minutes(10);
  };

  // A run of one rank.
  explicit World(Options options);
  // Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of torchrun, else the variables of Slurm or
  // Open MPI; without any it makes a run of one rank. On a GPU the device's index is LOCAL_RANK.
  // Throws Error(kUsage) if the variables contradict each other, Error(kIo) if the ranks do not
  // come together in time.
  static World from_environment(Options options);
  // One rank of `size` that share `store`.
  World(Options options, int rank, int size, c10::intrusive_ptr<c10d::Store> store);
  ~World();
  World(World&&) noexcept;
  World& operator=(World&&) noexcept;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_size() const { return local_size_; }  // ranks on this machine
  at::Device device() const { return options_.device; }
  std::chrono::milliseconds timeout() const { return options_.timeout; }
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }
  bool is_local() const { return local_; }  // all ranks are on this machine

 private:
  Options options_;
  int rank_ = 0;
  int size_ = 1;
  int local_size_ = 1;
  bool local_ = true;
  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<void> presence_;  // among ranks of other processes
};

// Runs `body` once for each of `size` ranks, as threads of this process over Gloo. Rethrows the
// first exception.
void run_ranks(int size, const World::Options& options, const std::function<void(World&)>& body);

}  // namespace ferry::models
