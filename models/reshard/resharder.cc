#include "models/reshard/resharder.h"

#define XXH_INLINE_ALL
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <xxhash.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/plan/sharded_tensor_codec.h"
#include "models/distributed/messages.h"
#include "models/reshard/message_delta.h"
#include "models/tensor_parallel/parameters.h"

namespace ferry::models {
namespace {

using distckpt::Box;
using distckpt::LocalShard;
using distckpt::RankCopy;
using distckpt::round_up;
using distckpt::ShardedTensor;

constexpr std::int64_t kAlignment = 16;          // of a box in its message
constexpr std::int64_t kMessageAlignment = 512;  // of a message in the staging memory
constexpr std::int64_t kLeastMessage = 4096;
constexpr std::int64_t kLargestBox = std::int64_t{1} << 30;

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::vector<std::vector<ShardedTensor>> gather_shards(const ProcessGroup& group,
                                                      const std::vector<LocalShard>& mine) {
  std::vector<ShardedTensor> tensors;
  for (const auto& shard : mine) tensors.push_back(shard.tensor);
  return distckpt::decode_ranks(group.all_gather_bytes(distckpt::encode_sharded_tensors(tensors)));
}

// Cuts a box into parts of at most so many bytes, as far as it can be cut.
std::vector<Box> cut(const Box& box, std::int64_t element_size, std::int64_t most) {
  const auto bytes = box.volume() * element_size;
  int dim = 0;
  while (dim < box.rank() && box.size[dim] == 1) ++dim;
  if (bytes <= most || dim == box.rank()) return {box};
  const auto rows = std::max<std::int64_t>(1, most / (bytes / box.size[dim]));
  std::vector<Box> parts;
  for (std::int64_t begin = 0; begin < box.size[dim]; begin += rows) {
    auto part = box;
    part.offset[dim] += begin;
    part.size[dim] = std::min(rows, box.size[dim] - begin);
    const auto smaller = cut(part, element_size, most);
    parts.insert(parts.end(), smaller.begin(), smaller.end());
  }
  return parts;
}

std::string digest_of(const at::Tensor& bytes) {
  const auto host = bytes.cpu();
  const auto hash = XXH3_128bits(host.const_data_ptr(), static_cast<std::size_t>(host.numel()));
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace

Resharder::Resharder(World& world,
                     const std::string& name,
                     std::vector<LocalShard> source,
                     std::vector<LocalShard> target,
                     ReshardOptions options)
    : world_(world),
      group_(world.size() == 1 ? ProcessGroup()
                               : ProcessGroup(world, name, all_ranks(world.size()))),
      delta_(options.delta),
      plan_(distckpt::plan_between_ranks(gather_shards(group_, source),
                                         gather_shards(group_, target))) {
  const auto keep = [](std::vector<LocalShard>& shards, std::size_t before, Side& side) {
    std::vector<std::byte*> addresses;
    std::unordered_map<const void*, std::size_t> memory_of;  // of each owner
    for (auto& shard : shards) {
      const auto& owner = shard.owner;
      const auto memory =
          owner ? memory_of.emplace(owner.get(), addresses.size()).first->second : addresses.size();
      if (memory == addresses.size()) addresses.push_back(shard.data);
      const auto strides = shard.byte_strides();
      side.shards.push_back({.tensor = std::move(shard.tensor),
                             .strides = strides,
                             .memory = static_cast<std::int32_t>(before + memory),
                             .offset = shard.data - addresses[memory]});
    }
    side.num_memories = addresses.size();
    return addresses;
  };
  const auto source_addresses = keep(source, 0, source_);
  const auto target_addresses = keep(target, source_.num_memories, target_);
  plan_local();
  make_rounds(options.bucket_bytes);
  set_memory(source_addresses, target_addresses);
}

BoxEnd Resharder::end_of(const Shard& shard, const Box& box) {
  const auto whole = shard.tensor.box();
  const auto prepended = shard.tensor.prepend_axis_num;
  BoxEnd end{.memory = shard.memory, .offset = shard.offset};
  for (int d = 0; d < box.rank(); ++d) {
    const auto stride = d < prepended ? 0 : shard.strides[d - prepended];
    end.offset += (box.offset[d] - whole.offset[d]) * stride;
    end.strides.push_back(stride);
  }
  return end;
}

void Resharder::plan_local() {
  for (const auto& copy : plan_.copies) {
    if (!copy.is_local() || copy.target.rank != world_.rank()) continue;
    const auto element = size_of(copy.dtype);
    for (const auto& box : cut(copy.box, element, kLargestBox))
      local_copies_.push_back({.size = box.size,
                               .element_size = element,
                               .from = end_of(source_.shards[copy.source.shard], box),
                               .to = end_of(target_.shards[copy.target.shard], box)});
    local_bytes_ += copy.num_bytes();
  }
  local_ = StridedCopies(local_copies_, world_.device());
}

// Every pair of ranks fills one message after another, in the order of the plan, which both know.
void Resharder::make_rounds(std::int64_t bucket_bytes) {
  const int me = world_.rank();
  std::map<int, std::map<int, int>> peers;  // of each rank
  for (const auto& copy : plan_.copies) {
    if (copy.is_local()) continue;
    ++peers[copy.source.rank][copy.target.rank];
    ++peers[copy.target.rank][copy.source.rank];
  }
  std::size_t most_peers = 1;
  for (const auto& [rank, others] : peers) most_peers = std::max(most_peers, others.size());
  const auto most =
      std::clamp(bucket_bytes / static_cast<std::int64_t>(most_peers), kLeastMessage, kLargestBox);

  struct Filling {
    std::size_t round = 0;
    Message message{};
    std::vector<BoxCopy> parts{};  // the staging's side begins at the message
  };
  std::vector<std::vector<Filling>> rounds;
  std::map<std::pair<int, bool>, Filling> filling;  // with a peer, to or from it
  const auto finish = [&](Filling& one) {
    if (rounds.size() <= one.round) rounds.resize(one.round + 1);
    rounds[one.round].push_back(one);
    ++one.round;
    one.message.bytes = 0;
    one.parts.clear();
  };
  for (const auto& copy : plan_.copies) {
    if (copy.is_local() || (copy.source.rank != me && copy.target.rank != me)) continue;
    const bool sends = copy.source.rank == me;
    const int peer = sends ? copy.target.rank : copy.source.rank;
    const auto element = size_of(copy.dtype);
    auto& one = filling[{peer, sends}];
    auto& message = one.message;
    for (const auto& box : cut(copy.box, element, most)) {
      const auto bytes = box.volume() * element;
      if (message.bytes > 0 && message.bytes + bytes > most) finish(one);
      if (message.bytes == 0) message = {.peer = peer, .sends = sends, .tensor = copy.tensor};
      BoxEnd staged{.offset = message.bytes, .strides = byte_strides(box.size, element)};
      const auto held = end_of(
          sends ? source_.shards[copy.source.shard] : target_.shards[copy.target.shard], box);
      one.parts.push_back({.size = box.size,
                           .element_size = element,
                           .from = sends ? held : staged,
                           .to = sends ? staged : held});
      message.bytes += round_up(bytes, kAlignment);
    }
  }
  for (auto& [direction, one] : filling) finish(one);

  for (auto& messages : rounds) {
    Round round;
    std::vector<BoxCopy> pack;
    std::vector<BoxCopy> unpack;
    for (auto& one : messages) {
      one.message.offset = round.bytes;
      for (auto& part : one.parts) {
        (one.message.sends ? part.to : part.from).offset += round.bytes;
        (one.message.sends ? pack : unpack).push_back(part);
      }
      round.bytes += round_up(one.message.bytes, kMessageAlignment);
      round.messages.push_back(one.message);
    }
    round.pack = StridedCopies(pack, world_.device());
    round.unpack = StridedCopies(unpack, world_.device());
    if (delta_ != Delta::kOff) {
      for (auto& part : unpack) std::swap(part.from, part.to);
      round.repack = StridedCopies(unpack, world_.device());
    }
    rounds_.push_back(std::move(round));
  }
}

void Resharder::set_memory(const std::vector<std::byte*>& source,
                           const std::vector<std::byte*>& target) {
  require(source.size() == source_.num_memories && target.size() == target_.num_memories,
          ErrorKind::kBug, "addresses of other shards than were planned");
  auto all = source;
  all.insert(all.end(), target.begin(), target.end());
  if (all == addresses_.host()) return;
  addresses_ = Addresses(std::move(all), world_.device());
  bytes_in_place_ = 0;
  for (const auto& copy : local_copies_) {
    if (addresses_.of(copy.from) == addresses_.of(copy.to))
      bytes_in_place_ += copy.size.product() * copy.element_size;
  }
}

ReshardReport Resharder::run() {
  return move(nullptr);
}

ReshardReport Resharder::run_and_verify() {
  std::vector<MessageDigest> digests;
  const auto report = move(&digests);
  std::map<std::string, std::string> digest_of_message;
  for (const auto& of_rank : gather(group_, digests)) {
    for (const auto& [message, digest] : of_rank) {
      const auto [found, is_new] = digest_of_message.try_emplace(message, digest);
      require(is_new || found->second == digest, ErrorKind::kCorrupt,
              "message {} (round, sender, receiver, first tensor) arrived with other bytes",
              message);
    }
  }
  return report;
}

void Resharder::fill_padding() const {
  for (const auto& fill : plan_.fills) {
    if (fill.target.rank != world_.rank()) continue;
    const auto& shard = target_.shards[fill.target.shard];
    const auto end = end_of(shard, fill.box);
    const auto dtype = shard.tensor.dtype;
    std::vector<std::int64_t> strides;
    for (const auto stride : end.strides) strides.push_back(stride / size_of(dtype));
    at::from_blob(
        addresses_.of(end), at::IntArrayRef(fill.box.size.begin(), fill.box.size.end()), strides,
        [](void*) {}, at::TensorOptions().dtype(scalar_type(dtype)).device(world_.device()),
        world_.device())
        .zero_();
  }
}

ReshardReport Resharder::move(std::vector<MessageDigest>* digests) {
  const int me = world_.rank();
  ReshardReport report{.bytes_in_place = bytes_in_place_,
                       .bytes_local = local_bytes_ - bytes_in_place_,
                       .rounds = static_cast<std::int64_t>(rounds_.size())};
  std::int64_t largest = 0;
  for (const auto& round : rounds_) largest = std::max(largest, round.bytes);
  // The rounds take turns with two buffers: one is packed or unpacked while one is under way.
  std::array<at::Tensor, 2> staging;
  for (auto& buffer : staging)
    buffer = at::empty({largest}, at::TensorOptions().dtype(at::kByte).device(world_.device()));
  report.staging_bytes = 2 * largest;
  std::array<Transfer, 2> transfers;
  const auto start = [&](std::size_t number) {
    transfers[number % 2] = begin(rounds_[number], staging[number % 2], report);
  };
  const auto finish = [&](std::size_t number) {
    const auto& round = rounds_[number];
    const auto& buffer = staging[number % 2];
    auto& [changes, pending] = transfers[number % 2];
    pending.wait();
    for (std::size_t i = 0; i < changes.size(); ++i) {
      const auto& message = round.messages[i];
      auto whole = buffer.narrow(0, message.offset, message.bytes);
      if (!message.sends && changes[i].defined()) apply_changes(changes[i], whole);
    }
    round.unpack.run(addresses_, static_cast<std::byte*>(buffer.mutable_data_ptr()));
    if (digests == nullptr) return;
    for (const auto& message : round.messages)
      digests->emplace_back(
          fmt::format("{} {} {} {}", number, message.sends ? me : message.peer,
                      message.sends ? message.peer : me, plan_.names[message.tensor]),
          digest_of(buffer.narrow(0, message.offset, message.bytes)));
  };
  for (std::size_t number = 0; number < std::min<std::size_t>(2, rounds_.size()); ++number)
    start(number);
  // While the first rounds are under way.
  fill_padding();
  local_.run(addresses_);
  for (std::size_t number = 0; number < rounds_.size(); ++number) {
    finish(number);
    if (number + 2 < rounds_.size()) start(number + 2);
  }
  for (const auto& round : rounds_) {
    for (const auto& message : round.messages)
      report.kept_bytes += message.sent.defined() ? message.bytes : 0;
  }
  return report;
}

// Senders tell receivers how long the changes of each message are, -1 for one that goes whole.
void Resharder::find_changes(Round& round, const at::Tensor& buffer, Transfer& transfer) const {
  const auto lengths_of = at::TensorOptions().dtype(at::kLong);
  std::vector<P2POp> lengths;
  for (auto& message : round.messages) {
    auto& changes = transfer.changes.emplace_back();
    auto length = at::full({1}, -1, lengths_of);
    if (message.sends) {
      const auto now = buffer.narrow(0, message.offset, message.bytes);
      if (message.sent.defined()) {
        changes = encode_changes(now, message.sent.to(now.device()));
        if (changes.defined()) length.fill_(changes.numel());
      } else {
        message.sent = at::empty({message.bytes},
                                 delta_ == Delta::kOnDevice
                                     ? now.options()
                                     : now.options().device(at::kCPU).pinned_memory(now.is_cuda()));
      }
      message.sent.copy_(now);
    }
    lengths.push_back(
        {.sends = message.sends, .tensor = length.to(buffer.device()), .peer = message.peer});
  }
  if (!lengths.empty()) group_.batch_isend_irecv(lengths).wait();
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i].sends) continue;
    const auto length = lengths[i].tensor.item<std::int64_t>();
    if (length >= 0) transfer.changes[i] = at::empty({length}, buffer.options());
  }
}

Resharder::Transfer Resharder::begin(Round& round,
                                     const at::Tensor& buffer,
                                     ReshardReport& report) const {
  auto* const staging = static_cast<std::byte*>(buffer.mutable_data_ptr());
  Transfer transfer;
  if (delta_ != Delta::kOff) {
    buffer.zero_();  // what lies between the parts of a message has to be the same on both sides
    round.repack.run(addresses_, staging);
  }
  round.pack.run(addresses_, staging);
  if (delta_ == Delta::kOff) {
    transfer.changes.resize(round.messages.size());
  } else {
    find_changes(round, buffer, transfer);
  }
  std::vector<P2POp> messages;
  for (std::size_t i = 0; i < round.messages.size(); ++i) {
    const auto& message = round.messages[i];
    const auto& changes = transfer.changes[i];
    const auto tensor =
        changes.defined() ? changes : buffer.narrow(0, message.offset, message.bytes);
    (message.sends ? report.bytes_sent : report.bytes_received) += tensor.numel();
    if (tensor.numel() > 0)
      messages.push_back({.sends = message.sends, .tensor = tensor, .peer = message.peer});
  }
  if (!messages.empty()) transfer.pending = group_.batch_isend_irecv(messages);
  return transfer;
}

}  // namespace ferry::models
