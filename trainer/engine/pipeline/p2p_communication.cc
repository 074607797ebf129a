#include "trainer/engine/pipeline/p2p_communication.h"

#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"

namespace ferry::trainer {

using models::P2POp;
using models::Pending;

P2PCommunicator::P2PCommunicator(models::World& world,
                                 const models::ParallelState& mesh,
                                 const std::string& name,
                                 bool interleaved) {
  const auto& stages = mesh.pp().ranks();
  const int count = mesh.pp().size();
  const int stage = mesh.pp().rank();
  const int pairs = count == 1 ? 0 : interleaved && count > 2 ? count : count - 1;
  for (int first = 0; first < pairs; ++first) {
    const int second = (first + 1) % count;
    if (stage != first && stage != second) continue;
    const int a = stages[static_cast<std::size_t>(first)];
    const int b = stages[static_cast<std::size_t>(second)];
    neighbours_.push_back({.stage = stage == first ? second : first,
                           .channel = {world, fmt::format("{}/{}", name, first),
                                       std::vector<int>{std::min(a, b), std::max(a, b)}}});
  }
  // NCCL connects at the first messages, and waits for the other rank: here, where all come in
  // turn.
  for (const auto& neighbour : neighbours_) {
    const auto greeting = [&] {
      return at::zeros({1}, at::TensorOptions().device(world.device()));
    };
    const bool speaks_first = stage < neighbour.stage;
    for (auto& [peer, pending] :
         exchange({{.sends = speaks_first, .tensor = greeting(), .peer = neighbour.stage},
                   {.sends = !speaks_first, .tensor = greeting(), .peer = neighbour.stage}}))
      pending.wait();
  }
}

std::vector<std::pair<int, Pending>> P2PCommunicator::exchange(
    const std::vector<P2POp>& messages) const {
  std::vector<std::pair<int, Pending>> pending;
  std::size_t begun = 0;
  for (const auto& neighbour : neighbours_) {
    std::vector<P2POp> ours;
    for (const auto& message : messages) {
      if (message.peer != neighbour.stage) continue;
      ours.push_back({message.sends, message.tensor.contiguous(), 1 - neighbour.channel.rank()});
    }
    begun += ours.size();
    if (!ours.empty())
      pending.emplace_back(neighbour.stage, neighbour.channel.batch_isend_irecv(ours));
  }
  require(begun == messages.size(), ErrorKind::kBug,
          "a message to a stage that is not next to this one");
  return pending;
}

}  // namespace ferry::trainer
