#include "models/distributed/process_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "distckpt/base/error.h"
#include "models/device/memory_error.h"
#include "models/distributed/failure_board.h"
#include "models/distributed/gloo_backend.h"
#include "models/distributed/meeting_store.h"
#include "models/distributed/nccl_backend.h"
#include "models/distributed/world.h"
#include "models/peer/peer_memory.h"

namespace ferry::models {
namespace {

constexpr int kGroupTag = 0;

// Sums [ranks, ...] over the ranks in their order, in fp32 where the elements are narrower.
at::Tensor sum_ranks(const at::Tensor& parts) {
  const auto dtype = parts.scalar_type();
  const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
  auto sum = narrow ? parts[0].to(at::kFloat) : parts[0].clone();
  for (std::int64_t rank = 1; rank < parts.size(0); ++rank) sum.add_(parts[rank]);
  return narrow ? sum.to(dtype) : sum;
}

at::Tensor empty_rows(const at::Tensor& like, std::int64_t rows) {
  auto shape = like.sizes().vec();
  shape[0] = rows;
  return at::empty(shape, like.options());
}

}  // namespace

namespace {

// Work that somebody else has launched.
class PolledWork : public c10d::Work {
 public:
  explicit PolledWork(std::function<bool()> done) : done_(std::move(done)) {}
  bool isCompleted() override { return done_(); }

 private:
  std::function<bool()> done_;
};

// One operation that the ranks of a group meet in.
struct Meeting {
  c10::intrusive_ptr<c10d::Store> board{};  // of the world
  std::string id{};                         // of the group, among all of the world
  std::string group{};
  std::vector<int> ranks{};  // of the world
  int rank = 0;              // in the group
  std::chrono::milliseconds timeout{};
  std::string operation{};
  std::uint64_t sequence = 0;
};

constexpr const char* kRoomForNccl =
    "NCCL allocates at its first operations what other memory has to leave: fewer tokens of a "
    "micro-batch (max_token_len_per_gpu), recompute_granularity=full, optimizer_offload=true, or a "
    "smaller gpu_memory_utilization of the rollout";

Error failure_of(const Meeting& meeting, const std::string& why) {
  if (says_out_of_memory(why))
    return {
        ErrorKind::kDevice,
        fmt::format("out of memory in {} number {} of group {} of ranks {}: {}", meeting.operation,
                    meeting.sequence, meeting.group, fmt::join(meeting.ranks, ", "), why),
        kRoomForNccl};
  const auto missing =
      missing_ranks(meeting.board, fmt::format("{}/{}", meeting.id, meeting.sequence),
                    meeting.ranks, meeting.ranks[static_cast<std::size_t>(meeting.rank)]);
  const auto who = missing.empty() ? std::string("all ranks came, and the connection broke")
                                   : fmt::format("missing: {}", fmt::join(missing, ", "));
  return {ErrorKind::kIo,
          fmt::format("group {} of ranks {}: {} number {} failed after {} s at most: {} ({})",
                      meeting.group, fmt::join(meeting.ranks, ", "), meeting.operation,
                      meeting.sequence, meeting.timeout.count() / 1000, who, why),
          "a rank that is missing has died or hangs: see its own output"};
}

}  // namespace

struct ProcessGroup::Backends {
  ~Backends() {
    if (!device || device == gloo) return;
    try {
      end_nccl(*device);
    } catch (const std::exception&) {  // the other ranks are gone already
    }
  }

  // Watches the call that joins an operation until the result is destroyed: NCCL's first operations
  // connect the ranks, in calls that wait for a rank for ever.
  [[nodiscard]] std::shared_ptr<void> watch_call() const {
    if (device == gloo) return nullptr;
    const auto returned = std::make_shared<std::atomic<bool>>(false);
    watch(c10::make_intrusive<PolledWork>([returned] { return returned->load(); }));
    return {nullptr, [returned](std::nullptr_t) { *returned = true; }};
  }

  // Watches work that this rank has joined: a kernel of NCCL does it later.
  void watch(const c10::intrusive_ptr<c10d::Work>& work) const {
    if (device == gloo) return;
    watch_nccl(work, run,
               [meeting = meeting](const std::string& why) { return failure_of(meeting, why); });
  }
  void wait(const c10::intrusive_ptr<c10d::Work>& work) const {
    watch(work);
    work->wait();
  }

  c10::intrusive_ptr<c10d::Backend> gloo;    // on the host
  c10::intrusive_ptr<c10d::Backend> device;  // where tensors live: gloo itself, or NCCL
  bool peers_asked = false;
  std::unique_ptr<PeerMemory> peers;  // for messages between GPUs
  std::atomic<std::uint64_t> sequence = 0;
  Meeting meeting;  // the last one
  std::shared_ptr<const WatchedRun> run;
};

ProcessGroup::ProcessGroup() = default;
ProcessGroup::~ProcessGroup() = default;
ProcessGroup::ProcessGroup(ProcessGroup&&) noexcept = default;
ProcessGroup& ProcessGroup::operator=(ProcessGroup&&) noexcept = default;

ProcessGroup::ProcessGroup(World& world, std::string name, std::vector<int> ranks)
    : name_(std::move(name)), ranks_(std::move(ranks)), world_(&world) {
  const auto me = std::ranges::find(ranks_, world.rank());
  require(me != ranks_.end(), ErrorKind::kBug, "rank {} is not of the group {}", world.rank(),
          name_);
  rank_ = static_cast<int>(me - ranks_.begin());
  if (size() == 1) return;
  backends_ = std::make_unique<Backends>();
  const auto prefix = fmt::format("{}/{}", name_, fmt::join(ranks_, "-"));
  backends_->meeting = {.board = world.store(),
                        .id = prefix,
                        .group = name_,
                        .ranks = ranks_,
                        .rank = rank_,
                        .timeout = world.timeout()};
  backends_->run = std::make_shared<const WatchedRun>(
      WatchedRun{.timeout = world.timeout(),
                 .has_failed = [board = world.store(),
                                rank = world.rank()] { return failure_announced(board, rank); },
                 .last_words =
                     [&world](const Error& error) {
                       announce_failure(world, error);
                       wait_for_failures(world);
                     }});
  or_out_of_memory(
      fmt::format("making group {} of ranks {}", name_, fmt::join(ranks_, ", ")), "", [&] {
        run("creation", [&] {
          make_together(prefix, world, rank_, size(), [&](const auto& store) {
            backends_->gloo = make_gloo(store, rank_, size(), world);
          });
          backends_->device = backends_->gloo;
          if (!world.device().is_cuda()) return;
          // NCCL's ranks meet at the first operation, which watch_nccl() watches.
          const auto plain = c10::make_intrusive<c10d::PrefixStore>(prefix, world.store());
          backends_->device = make_nccl(plain, rank_, size(), world);
        });
      });
}

void ProcessGroup::run(std::string_view operation, const std::function<void()>& work) const {
  attempt(operation, backends_->sequence++, work);
}

void ProcessGroup::attempt(std::string_view operation,
                           std::uint64_t sequence,
                           const std::function<void()>& work) const {
  auto& meeting = backends_->meeting;
  meeting.operation = operation;
  meeting.sequence = sequence;
  const auto watched = backends_->watch_call();
  try {
    work();
  } catch (const std::exception& error) {
    if (is_out_of_memory(error)) throw;  // a cause, which the others wait for
    throw failure_of(meeting, text_of(error));
  }
}

void ProcessGroup::map_peer_memory() const {
  if (size() == 1 || std::exchange(backends_->peers_asked, true)) return;
  backends_->peers =
      PeerMemory::make(rank_, size(), world_->device(),
                       [this](std::string_view mine) { return all_gather_bytes(mine); });
}

const PeerMemory* ProcessGroup::peer_memory() const {
  return backends_ ? backends_->peers.get() : nullptr;
}

// Undefined where NCCL has to do it.
template <typename Operation>
at::Tensor ProcessGroup::through_peers(std::string_view name,
                                       Operation operation,
                                       const at::Tensor& mine) const {
  auto* const peers = backends_->peers.get();
  if (peers == nullptr || !peers->takes(operation, mine)) return {};
  return run_on_peers(name, [&] { return peers->exchange(operation, mine); });
}

at::Tensor ProcessGroup::run_on_peers(std::string_view name,
                                      const std::function<at::Tensor()>& exchange) const {
  at::Tensor result;
  run(name, [&] {
    result = exchange();
    if (auto done = backends_->peers->done())
      backends_->watch(c10::make_intrusive<PolledWork>(std::move(done)));
  });
  return result;
}

at::Tensor ProcessGroup::all_gather(const at::Tensor& mine) const {
  if (size() == 1) return mine;
  if (auto gathered = through_peers("all_gather", PeerOperation::kAllGather, mine);
      gathered.defined())
    return gathered;
  auto whole = empty_rows(mine, mine.size(0) * size());
  auto part = mine.contiguous();
  run("all_gather", [&] { backends_->wait(backends_->device->_allgather_base(whole, part)); });
  return whole;
}

at::Tensor ProcessGroup::all_gather_channels(const at::Tensor& mine) const {
  if (size() == 1) return mine;
  auto gathered = through_peers("all_gather", PeerOperation::kAllGatherChannels, mine);
  return gathered.defined() ? gathered : side_by_side(all_gather(mine), size());
}

at::Tensor ProcessGroup::reduce_scatter(const at::Tensor& whole) const {
  if (size() == 1) return whole;
  require(whole.size(0) % size() == 0, ErrorKind::kBug, "{} rows over {} ranks", whole.size(0),
          size());
  if (auto sum = through_peers("reduce_scatter", PeerOperation::kReduceScatter, whole);
      sum.defined())
    return sum;
  if (whole.is_cuda()) {
    auto input = whole.contiguous();
    auto mine = empty_rows(whole, whole.size(0) / size());
    run("reduce_scatter",
        [&] { backends_->wait(backends_->device->_reduce_scatter_base(mine, input)); });
    return mine;
  }
  const auto parts = all_to_all(whole);
  auto shape = parts.sizes().vec();
  shape[0] /= size();
  shape.insert(shape.begin(), size());
  return sum_ranks(parts.view(shape));
}

at::Tensor ProcessGroup::all_reduce(const at::Tensor& mine) const {
  if (size() == 1) return mine;
  if (auto sum = through_peers("all_reduce", PeerOperation::kAllReduce, mine); sum.defined())
    return sum;
  if (mine.is_cuda()) {
    std::vector<at::Tensor> sum{mine.clone(at::MemoryFormat::Contiguous)};
    run("all_reduce", [&] { backends_->wait(backends_->device->allreduce(sum)); });
    return sum[0];
  }
  return sum_ranks(all_gather(mine.unsqueeze(0)));
}

at::Tensor ProcessGroup::all_reduce_max(const at::Tensor& mine) const {
  if (size() == 1) return mine;
  std::vector<at::Tensor> greatest{mine.clone(at::MemoryFormat::Contiguous)};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  run("all_reduce_max", [&] { backends_->wait(backends_->device->allreduce(greatest, options)); });
  return greatest[0];
}

at::Tensor ProcessGroup::all_to_all(const at::Tensor& mine,
                                    const std::vector<std::int64_t>& send_rows,
                                    const std::vector<std::int64_t>& receive_rows) const {
  auto [received, moved] = begin_all_to_all(mine, send_rows, receive_rows);
  moved.wait();
  return received;
}

at::Tensor ProcessGroup::all_to_all_rows(const at::Tensor& mine,
                                         const at::Tensor& places,
                                         const at::Tensor& end) const {
  require(places.size(0) % size() == 0, ErrorKind::kBug, "{} rows over {} ranks", places.size(0),
          size());
  if (size() == 1) return mine.index_select(0, places);
  if (auto* const peers = backends_->peers.get();
      peers != nullptr && peers->takes_rows(mine, places))
    return run_on_peers("all_to_all_rows", [&] { return peers->exchange_rows(mine, places, end); });
  // All but one rank add zeros to a row, so that sums are exact.
  auto shape = std::vector<std::int64_t>(static_cast<std::size_t>(mine.dim()), 1);
  shape[0] = places.size(0);
  return reduce_scatter(mine.index_select(0, places).masked_fill_(places.ge(end).view(shape), 0));
}

at::Tensor ProcessGroup::broadcast(const at::Tensor& mine, int from) const {
  if (size() == 1) return mine;
  std::vector<at::Tensor> tensors{rank_ == from ? mine.contiguous() : at::empty_like(mine)};
  c10d::BroadcastOptions options;
  options.rootRank = from;
  run("broadcast", [&] { backends_->wait(backends_->device->broadcast(tensors, options)); });
  return tensors[0];
}

void ProcessGroup::send(const at::Tensor& tensor, int to) const {
  std::vector<at::Tensor> tensors{tensor.contiguous()};
  run("send", [&] { backends_->wait(backends_->device->send(tensors, to, kGroupTag)); });
}

void ProcessGroup::receive(at::Tensor& tensor, int from) const {
  std::vector<at::Tensor> tensors{tensor};
  run("receive", [&] { backends_->wait(backends_->device->recv(tensors, from, kGroupTag)); });
}

// `operation` outlives the wait: it is a literal.
template <typename Start>
Pending ProcessGroup::begin(std::string_view operation, const Start& start) const {
  const auto sequence = backends_->sequence++;
  c10::intrusive_ptr<c10d::Work> work;
  attempt(operation, sequence, [&] {
    work = start();
    backends_->watch(work);
  });
  return {
      [this, operation, sequence, work] { attempt(operation, sequence, [&] { work->wait(); }); },
      [work] { return work->isCompleted(); }};
}

Pending ProcessGroup::batch_isend_irecv(const std::vector<P2POp>& messages) const {
  auto& device = *backends_->device;
  const auto start_one = [&](const P2POp& message) {
    std::vector<at::Tensor> tensors{message.tensor};
    return message.sends ? device.send(tensors, message.peer, kGroupTag)
                         : device.recv(tensors, message.peer, kGroupTag);
  };
  if (backends_->device != backends_->gloo) {
    auto batch = begin("batch_isend_irecv", [&] {
      device.startCoalescing();
      for (const auto& message : messages) start_one(message);
      return device.endCoalescing();
    });
    return {[batch, messages]() mutable { batch.wait(); }, [batch] { return batch.done(); }};
  }
  std::vector<Pending> begun;
  for (const auto& message : messages)
    begun.push_back(begin(message.sends ? "isend" : "irecv", [&] { return start_one(message); }));
  return {[begun, messages]() mutable {
            for (auto& one : begun) one.wait();
          },
          [] { return false; }};
}

at::Tensor ProcessGroup::my_part(const at::Tensor& whole) const {
  require(whole.is_contiguous() && whole.size(0) % size() == 0, ErrorKind::kBug,
          "{} rows over {} ranks", whole.size(0), size());
  const auto rows = whole.size(0) / size();
  return whole.narrow(0, rank_ * rows, rows);
}

std::pair<at::Tensor, Pending> ProcessGroup::begin_all_to_all(
    const at::Tensor& mine,
    const std::vector<std::int64_t>& send_rows,
    const std::vector<std::int64_t>& receive_rows) const {
  if (size() == 1) return {mine, Pending()};
  const auto rows = receive_rows.empty() ? mine.size(0)
                                         : std::accumulate(receive_rows.begin(), receive_rows.end(),
                                                           std::int64_t{0});
  auto received = empty_rows(mine, rows);
  auto sent = mine.contiguous();
  auto send = send_rows;
  auto receive = receive_rows;
  auto moved = begin("all_to_all", [&] {
    return backends_->device->alltoall_base(received, sent, receive, send);
  });
  return {received, Pending([moved, sent, received]() mutable { moved.wait(); },
                            [moved] { return moved.done(); })};
}

Pending ProcessGroup::reduce_scatter_in_place(const at::Tensor& whole) const {
  if (size() == 1) return {};
  auto input = whole;
  auto mine = my_part(whole);
  if (whole.is_cuda()) {
    return begin("reduce_scatter",
                 [&] { return backends_->device->_reduce_scatter_base(mine, input); });
  }
  auto parts = at::empty_like(whole);
  std::vector<std::int64_t> equal;
  auto moved = begin("reduce_scatter",
                     [&] { return backends_->device->alltoall_base(parts, input, equal, equal); });
  return {[moved, mine, parts, input, ranks = size()]() mutable {
            moved.wait();
            auto shape = parts.sizes().vec();
            shape[0] /= ranks;
            shape.insert(shape.begin(), ranks);
            mine.copy_(sum_ranks(parts.view(shape)));
          },
          [moved] { return moved.done(); }};
}

Pending ProcessGroup::all_gather_in_place(const at::Tensor& whole) const {
  if (size() == 1) return {};
  auto output = whole;
  auto mine = whole.is_cuda() ? my_part(whole) : my_part(whole).clone();
  auto gathered =
      begin("all_gather", [&] { return backends_->device->_allgather_base(output, mine); });
  return {[gathered, output, mine]() mutable { gathered.wait(); },
          [gathered] { return gathered.done(); }};
}

void ProcessGroup::watch(std::string_view operation, std::function<bool()> done) const {
  if (size() == 1) return;
  run(operation, [&] { backends_->watch(c10::make_intrusive<PolledWork>(std::move(done))); });
}

void ProcessGroup::barrier() const {
  if (size() == 1) return;
  run("barrier", [&] { backends_->gloo->barrier()->wait(); });
}

std::vector<std::string> ProcessGroup::all_gather_bytes(std::string_view mine) const {
  if (size() == 1) return {std::string(mine)};
  const auto gather = [&](const at::Tensor& part) {
    auto whole = at::empty({size(), part.size(0)}, part.options());
    auto flat = whole.view({-1});
    auto input = part;
    run("all_gather_bytes", [&] { backends_->gloo->_allgather_base(flat, input)->wait(); });
    return whole;
  };
  auto length = at::empty({1}, at::kLong);
  *length.mutable_data_ptr<std::int64_t>() = static_cast<std::int64_t>(mine.size());
  const auto lengths = gather(length);
  const auto* const sizes = lengths.const_data_ptr<std::int64_t>();
  const auto longest = *std::max_element(sizes, sizes + size());
  auto padded = at::empty({std::max<std::int64_t>(longest, 1)}, at::kByte);
  std::memcpy(padded.mutable_data_ptr(), mine.data(), mine.size());
  const auto all = gather(padded);
  std::vector<std::string> texts;
  for (int rank = 0; rank < size(); ++rank) {
    texts.emplace_back(static_cast<const char*>(all[rank].const_data_ptr()),
                       static_cast<std::size_t>(sizes[rank]));
  }
  return texts;
}

at::Tensor side_by_side(const at::Tensor& parts, int size) {
  const auto rows = parts.size(0) / size;
  const auto channels = parts.size(1);
  return parts.view({size, rows, channels}).permute({1, 0, 2}).reshape({rows, size * channels});
}

}  // namespace ferry::models
