#include "models/resharder.h"

#define XXH_INLINE_ALL
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <xxhash.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "distckpt/error.h"
#include "distckpt/sharded_tensor_codec.h"
#include "models/parameters.h"

namespace ferry::models {
namespace {

using distckpt::Box;
using distckpt::LocalShard;
using distckpt::RankCopy;
using distckpt::ShardedTensor;

constexpr std::int64_t kAlignment = 16;
constexpr std::int64_t kLeastMessage = 4096;

std::vector<int> all_ranks(int size) {
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

std::vector<std::vector<ShardedTensor>> gather_shards(const ProcessGroup& group,
                                                      const std::vector<LocalShard>& mine) {
  std::vector<ShardedTensor> tensors;
  for (const auto& shard : mine) tensors.push_back(shard.tensor);
  const auto all = group.all_gather_bytes(distckpt::encode_sharded_tensors(tensors));
  std::vector<std::vector<ShardedTensor>> ranks;
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    ranks.push_back(
        distckpt::decode_sharded_tensors(all[rank], fmt::format("the shards of rank {}", rank)));
  return ranks;
}

// A box in parts of at most so many bytes, as far as it can be cut.
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
      source_(std::move(source)),
      target_(std::move(target)),
      plan_(distckpt::plan_between_ranks(gather_shards(group_, source_),
                                         gather_shards(group_, target_))) {
  make_rounds(options.bucket_bytes);
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
  const auto most = std::max(bucket_bytes / static_cast<std::int64_t>(most_peers), kLeastMessage);

  struct Filling {
    std::size_t round = 0;
    Message message{};
  };
  std::map<std::pair<int, bool>, Filling> filling;  // with a peer, to or from it
  for (const auto& copy : plan_.copies) {
    if (copy.is_local() || (copy.source.rank != me && copy.target.rank != me)) continue;
    const bool sends = copy.source.rank == me;
    const int peer = sends ? copy.target.rank : copy.source.rank;
    auto& [round, message] = filling[{peer, sends}];
    message.peer = peer;
    message.sends = sends;
    for (const auto& box : cut(copy.box, size_of(copy.dtype), most)) {
      const auto bytes = box.volume() * size_of(copy.dtype);
      if (message.bytes > 0 && message.bytes + bytes > most) {
        add_message(round++, std::exchange(message, {.peer = peer, .sends = sends}));
      }
      message.parts.push_back({.copy = &copy, .box = box, .offset = message.bytes});
      message.bytes += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  for (auto& [direction, one] : filling) add_message(one.round, std::move(one.message));
}

void Resharder::add_message(std::size_t round, Message message) {
  if (rounds_.size() <= round) rounds_.resize(round + 1);
  rounds_[round].push_back(std::move(message));
}

at::Tensor Resharder::view(const std::vector<LocalShard>& shards,
                           const distckpt::ShardOfRank& at,
                           const Box& box) const {
  const auto& shard = shards[at.shard];
  const auto& tensor = shard.tensor;
  const auto whole = tensor.box();
  const auto strides =
      shard.strides.empty() ? row_major_strides(tensor.local_shape) : shard.strides;
  std::int64_t offset = 0;
  std::vector<std::int64_t> sizes;
  for (int d = tensor.prepend_axis_num; d < box.rank(); ++d) {
    sizes.push_back(box.size[d]);
    offset += (box.offset[d] - whole.offset[d]) * strides[d - tensor.prepend_axis_num];
  }
  const auto options = at::TensorOptions().dtype(scalar_type(tensor.dtype)).device(world_.device());
  return at::from_blob(
      shard.data + offset * size_of(tensor.dtype), sizes,
      std::vector<std::int64_t>(strides.begin(), strides.end()), [](void*) {}, options,
      world_.device());
}

// The bytes of a part, in its message, as a tensor of its shape.
at::Tensor Resharder::packed(const at::Tensor& bytes, const Part& part) const {
  const auto& shards = part.copy->source.rank == world_.rank() ? source_ : target_;
  const auto& at = part.copy->source.rank == world_.rank() ? part.copy->source : part.copy->target;
  const auto like = view(shards, at, part.box);
  return bytes.narrow(0, part.offset, part.box.volume() * size_of(part.copy->dtype))
      .view(like.scalar_type())
      .view(like.sizes());
}

void Resharder::set_memory(std::vector<LocalShard> source, std::vector<LocalShard> target) {
  const auto replace = [](std::vector<LocalShard>& mine, std::vector<LocalShard>&& other) {
    require(mine.size() == other.size(), ErrorKind::kBug, "other shards than were planned");
    for (std::size_t i = 0; i < mine.size(); ++i) {
      require(mine[i].tensor.key == other[i].tensor.key &&
                  mine[i].tensor.box() == other[i].tensor.box(),
              ErrorKind::kBug, "{}: not the shard that was planned", other[i].tensor.key);
    }
    mine = std::move(other);
  };
  replace(source_, std::move(source));
  replace(target_, std::move(target));
}

ReshardReport Resharder::run() {
  return move(nullptr);
}

ReshardReport Resharder::run_and_verify() {
  std::vector<std::string> digests;
  const auto report = move(&digests);
  std::string mine;
  for (const auto& digest : digests) mine += digest + "\n";
  // "round sender receiver digest", from both sides of each message.
  std::map<std::string, std::string> of_message;
  for (const auto& text : group_.all_gather_bytes(mine)) {
    for (std::size_t begin = 0; begin < text.size();) {
      const auto end = text.find('\n', begin);
      const auto line = text.substr(begin, end - begin);
      begin = end + 1;
      const auto space = line.rfind(' ');
      const auto [found, is_new] =
          of_message.try_emplace(line.substr(0, space), line.substr(space + 1));
      require(is_new || found->second == line.substr(space + 1), ErrorKind::kCorrupt,
              "message {} (round, sender, receiver, first tensor) arrived with other bytes",
              line.substr(0, space));
    }
  }
  return report;
}

ReshardReport Resharder::move(std::vector<std::string>* digests) {
  const int me = world_.rank();
  ReshardReport report{.rounds = static_cast<std::int64_t>(rounds_.size())};
  for (const auto& fill : plan_.fills) {
    if (fill.target.rank == me) view(target_, fill.target, fill.box).zero_();
  }
  for (const auto& copy : plan_.copies) {
    if (!copy.is_local() || copy.target.rank != me) continue;
    const auto to = view(target_, copy.target, copy.box);
    const auto from = view(source_, copy.source, copy.box);
    const bool in_place = to.data_ptr() == from.data_ptr() && to.strides() == from.strides();
    (in_place ? report.bytes_in_place : report.bytes_local) += copy.num_bytes();
    if (!in_place) to.copy_(from);
  }
  struct UnderWay {
    const Round* round = nullptr;
    std::vector<at::Tensor> staging{};  // of each message
    Pending pending{};
  };
  const auto bytes = at::TensorOptions().dtype(at::kByte).device(world_.device());
  const auto name_of = [&](std::int64_t round, const Message& message) {
    return fmt::format("{} {} {} {}", round, message.sends ? me : message.peer,
                       message.sends ? message.peer : me,
                       plan_.names[message.parts.front().copy->tensor]);
  };
  const auto finish = [&](UnderWay& one) {
    if (one.round == nullptr) return;
    one.pending.wait();
    for (std::size_t i = 0; i < one.round->size(); ++i) {
      const auto& message = (*one.round)[i];
      if (digests != nullptr)
        digests->push_back(fmt::format("{} {}", name_of(one.round - rounds_.data(), message),
                                       digest_of(one.staging[i])));
      if (message.sends) continue;
      for (const auto& part : message.parts)
        view(target_, part.copy->target, part.box).copy_(packed(one.staging[i], part));
    }
    one = {};
  };
  UnderWay before;
  for (const auto& round : rounds_) {
    UnderWay now{.round = &round};
    std::vector<P2POp> messages;
    std::int64_t staged = 0;
    for (const auto& message : round) {
      now.staging.push_back(at::empty({message.bytes}, bytes));
      staged += message.bytes;
      (message.sends ? report.bytes_sent : report.bytes_received) += message.bytes;
      if (message.sends) {
        for (const auto& part : message.parts)
          packed(now.staging.back(), part).copy_(view(source_, part.copy->source, part.box));
      }
      messages.push_back(
          {.sends = message.sends, .tensor = now.staging.back(), .peer = message.peer});
    }
    if (!messages.empty()) now.pending = group_.batch_isend_irecv(messages);
    report.staging_bytes = std::max(report.staging_bytes, 2 * staged);
    finish(before);
    before = std::move(now);
  }
  finish(before);
  return report;
}

}  // namespace ferry::models
