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
#include <utility>
#include <vector>

namespace ferry::models {

class World;

// A transfer under way, which keeps its tensors alive. On a GPU wait() lets the current stream
// wait, not the caller.
class Pending {
 public:
  Pending() = default;  // nothing is under way
  Pending(std::function<void()> finish, std::function<bool()> done)
      : finish_(std::move(finish)), done_(std::move(done)) {}

  // Once; throws as the operation would.
  void wait() {
    if (const auto finish = std::exchange(finish_, nullptr)) finish();
  }
  // Whether a wait would be over at once. On the host nothing is done before it was waited for.
  bool done() const { return !finish_ || done_(); }

 private:
  std::function<void()> finish_{};
  std::function<bool()> done_{};
};

// A message of batch_isend_irecv().
struct P2POp {
  bool sends = true;    // else receives
  at::Tensor tensor{};  // contiguous
  int peer = 0;         // in the group
};

class ProcessGroup {
 public:
  ProcessGroup();  // of this rank alone
  // Called by every rank of `ranks` (of the world, ascending), with the same name, in the same
  // order as other groups. Throws Error(kIo) if they do not come together.
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

  // The same, begun: nobody may touch the tensors before they have been waited for.
  //
  // Messages that are under way together: none waits for another. Both ranks of a message name it
  // in one batch, all messages between two ranks in one order.
  Pending batch_isend_irecv(const std::vector<P2POp>& messages) const;
  // Of a contiguous [size * n]: this rank's n become the sum of theirs, the others are worthless;
  // or all become those of their ranks.
  Pending reduce_scatter_in_place(const at::Tensor& whole) const;
  Pending all_gather_in_place(const at::Tensor& whole) const;

  // Ranks that end together end their groups without breaking others' last collective.
  void barrier() const;

  // Small things of the host, over Gloo whatever the device: one string of each rank.
  std::vector<std::string> all_gather_bytes(std::string_view mine) const;

 private:
  struct Backends;
  void run(std::string_view operation, const std::function<void()>& work) const;
  void attempt(std::string_view operation,
               std::uint64_t sequence,
               const std::function<void()>& work) const;
  template <typename Start>
  Pending begin(std::string_view operation, const Start& start) const;
  at::Tensor my_part(const at::Tensor& whole) const;

  std::string name_ = "alone";
  std::vector<int> ranks_{0};
  int rank_ = 0;
  World* world_ = nullptr;
  std::unique_ptr<Backends> backends_;
};

}  // namespace ferry::models
