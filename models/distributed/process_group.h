// One group of ranks and its collectives, over c10d: Gloo on the host, NCCL on GPUs. A group of one
// rank does not communicate. Sums on the host add up in the order of the ranks. On GPUs that have
// mapped each other's memory (map_peer_memory()) gathers go there, and all_reduce() and
// reduce_scatter() of small messages, whose sums, too, add up in the order of the ranks.
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

class PeerMemory;
class World;

// A transfer under way. It keeps its tensors alive. On a GPU wait() makes the current stream wait,
// not the caller.
class Pending {
 public:
  Pending() = default;  // nothing is under way
  Pending(std::function<void()> finish, std::function<bool()> done)
      : finish_(std::move(finish)), done_(std::move(done)) {}

  // Waits for the transfer; later calls do nothing. Throws as the blocking operation would.
  void wait() {
    if (const auto finish = std::exchange(finish_, nullptr)) finish();
  }
  // True if wait() would return at once. A transfer on the host is never done before wait().
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
  // Called by every rank of `ranks` (numbers in the world, ascending), with the same name, in the
  // same order as other groups. The world outlives the group. Throws Error(kIo) if a rank does not
  // come in time.
  ProcessGroup(World& world, std::string name, std::vector<int> ranks);
  ~ProcessGroup();
  ProcessGroup(ProcessGroup&&) noexcept;
  ProcessGroup& operator=(ProcessGroup&&) noexcept;

  int rank() const { return rank_; }  // in this group
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::string& name() const { return name_; }
  const std::vector<int>& ranks() const { return ranks_; }  // of the world

  // Gathers [n, ...] of every rank -> [size * n, ...], in the order of the ranks.
  at::Tensor all_gather(const at::Tensor& mine) const;
  // Gathers [n, channels] of every rank -> [n, size * channels].
  at::Tensor all_gather_channels(const at::Tensor& mine) const;
  // Sums [size * n, ...] over the ranks -> [n, ...], this rank's part. The host sums bf16 in fp32.
  at::Tensor reduce_scatter(const at::Tensor& whole) const;
  at::Tensor all_reduce(const at::Tensor& mine) const;
  at::Tensor all_reduce_max(const at::Tensor& mine) const;
  // `send_rows`, `receive_rows` [size]: the number of rows that go to each rank and come from each;
  // empty: equal parts.
  at::Tensor all_to_all(const at::Tensor& mine,
                        const std::vector<std::int64_t>& send_rows = {},
                        const std::vector<std::int64_t>& receive_rows = {}) const;
  // Brings rows to their ranks; only the device knows how many go where. Row i of [size * n] lies
  // with the one rank for which places[i] is less than `end`, in that row of its `mine`. mine
  // [rows, ...], places [size * n] int64, end [1] int32 -> [n, ...], this rank's part.
  at::Tensor all_to_all_rows(const at::Tensor& mine,
                             const at::Tensor& places,
                             const at::Tensor& end) const;
  at::Tensor broadcast(const at::Tensor& mine, int from) const;
  void send(const at::Tensor& tensor, int to) const;
  void receive(at::Tensor& tensor, int from) const;

  // The following functions begin a transfer and return. The tensors must not be touched before
  // Pending::wait().
  //
  // Sends and receives a batch of messages, none of which waits for another. Both ranks of a
  // message name it in one batch, and list all messages between them in the same order.
  Pending batch_isend_irecv(const std::vector<P2POp>& messages) const;
  // all_to_all(): what it will have received.
  std::pair<at::Tensor, Pending> begin_all_to_all(
      const at::Tensor& mine,
      const std::vector<std::int64_t>& send_rows,
      const std::vector<std::int64_t>& receive_rows) const;
  // Collectives within one contiguous tensor [size * n]. reduce_scatter leaves the sum in this
  // rank's n elements and garbage in the others; all_gather fills each part from its rank.
  Pending reduce_scatter_in_place(const at::Tensor& whole) const;
  Pending all_gather_in_place(const at::Tensor& whole) const;

  // Maps the memory of the ranks' GPUs for messages, where they are on one host and can reach
  // each other (models/peer/peer_memory.h). Called by all ranks; later calls do nothing.
  void map_peer_memory() const;
  // Null unless map_peer_memory() has found a way.
  const PeerMemory* peer_memory() const;

  // Watches work on the device that holds collectives of this group, a graph of them: if it is not
  // `done` within the group's timeout, or another rank fails, the process ends as for a collective.
  void watch(std::string_view operation, std::function<bool()> done) const;

  // Waits for all ranks. Called before ranks end, so that none breaks the last collective of
  // another.
  void barrier() const;

  // Gathers one string of each rank, in the order of the ranks, over Gloo on any device. For small
  // data.
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
  template <typename Operation>
  at::Tensor through_peers(std::string_view name,
                           Operation operation,
                           const at::Tensor& mine) const;
  at::Tensor run_on_peers(std::string_view name, const std::function<at::Tensor()>& exchange) const;

  std::string name_ = "alone";
  std::vector<int> ranks_{0};
  int rank_ = 0;
  World* world_ = nullptr;
  std::unique_ptr<Backends> backends_;
};

// [size * n, channels], one part below the other -> [n, size * channels].
at::Tensor side_by_side(const at::Tensor& parts, int size);

}  // namespace ferry::models
