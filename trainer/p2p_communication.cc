#include "trainer/p2p_communication.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "distckpt/error.h"
#include "models/world.h"

namespace ferry::trainer {

P2PCommunicator::P2PCommunicator(models::World& world,
                                 const models::ParallelState& mesh,
                                 const std::string& name,
                                 bool interleaved) {
  const auto& stages = mesh.pp().ranks();
  const int count = mesh.pp().size();
  const int stage = mesh.pp().rank();
  const auto make = [&](const char* kind, int from, int to) {
    const int a = stages[static_cast<std::size_t>(from)];
    const int b = stages[static_cast<std::size_t>(to)];
    auto channel =
        std::make_unique<models::ProcessGroup>(world, fmt::format("{}/{}/{}", name, kind, from),
                                               std::vector<int>{std::min(a, b), std::max(a, b)});
    // NCCL connects at the first message, and waits for the other rank: here, where all come in
    // turn.
    auto greeting = at::zeros({1}, at::TensorOptions().device(world.device()));
    (stage == from ? send(channel, greeting) : receive(channel, greeting)).wait();
    return channel;
  };
  // All stages make their channels in one order, that of the earlier stage.
  for (int from = 0; from < (interleaved ? count : count - 1); ++from) {
    const int to = (from + 1) % count;
    if (count == 1 || (stage != from && stage != to)) continue;
    auto forward = make("forward", from, to);
    auto backward = make("backward", to, from);
    (stage == from ? forward_out_ : forward_in_) = std::move(forward);
    (stage == from ? backward_in_ : backward_out_) = std::move(backward);
  }
}

models::Pending P2PCommunicator::send(const Channel& channel, const at::Tensor& tensor) {
  require(channel != nullptr, ErrorKind::kBug, "this stage has nobody to send that to");
  return channel->isend(tensor, 1 - channel->rank());
}

models::Pending P2PCommunicator::receive(const Channel& channel, const at::Tensor& tensor) {
  require(channel != nullptr, ErrorKind::kBug, "this stage has nobody to receive that from");
  return channel->irecv(tensor, 1 - channel->rank());
}

}  // namespace ferry::trainer
