// One group of ranks and its collectives, over c10d: Gloo on the host, NCCL on GPUs. A group of one
// rank communicates with nobody. Tensors are moved, and summed in the order of the ranks where the
// host sums them.
//
// A collective that some rank never joins ends after the group's timeout, on every rank that did,
// with Error(kIo) that names the group, the operation and the ranks that are missing.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::models {

class World;

class ProcessGroup {
 public:
  ProcessGroup();  // of this rank alone
  // Called by every rank of `ranks` (of the world, ascending), with the same name, in the same order
  // as other groups. Throws Error(kIo) if they do not come together.
  ProcessGroup(World& world, std::string name, std::vector<int> ranks);
  ~ProcessGroup();
  ProcessGroup(ProcessGroup&&) noexcept;
  ProcessGroup& operator=(ProcessGroup&&) noexcept;

  int rank() const { return rank_; }  // in this group
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::string& name() const { return name_; }
  const std::vector<int>& ranks() const { return ranks_; }  // of the world

  // [n, ...] of every rank -> [size * n, ...], in the order of the ranks.
  at::Tensor all_gather(const at::Tensor& mine) const;
  // [size * n, ...] -> [n, ...]: this rank's part of the sum. Sums bf16 in fp32 on the host.
  at::Tensor reduce_scatter(const at::Tensor& whole) const;
  at::Tensor all_reduce(const at::Tensor& mine) const;
  at::Tensor all_reduce_max(const at::Tensor& mine) const;
  // Rows sent to each rank and received from each; none: equal parts.
  at::Tensor all_to_all(const at::Tensor& mine,
                        const std::vector<std::int64_t>& send_rows = {},
                        const std::vector<std::int64_t>& receive_rows = {}) const;
  at::Tensor broadcast(const at::Tensor& mine, int from) const;
  void send(const at::Tensor& tensor, int to) const;
  void receive(at::Tensor& tensor, int from) const;
  // Ranks that end together end their groups without breaking others' last collective.
  void barrier() const;

  // Small things of the host, over Gloo whatever the device: one string of each rank.
  std::vector<std::string> all_gather_bytes(std::string_view mine) const;

 private:
  struct Backends;
  void run(std::string_view operation, const std::function<void()>& work) const;

  std::string name_ = "alone";
  std::vector<int> ranks_{0};
  int rank_ = 0;
  World* world_ = nullptr;
  std::unique_ptr<Backends> backends_;
};

}  // namespace ferry::models
