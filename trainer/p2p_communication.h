// What pipeline stages hand each other: activations to the next one, gradients to the one before.
// Each direction of each kind between two stages has a communicator of its own, so that messages
// are taken in the order they were sent in and none waits for one of another kind.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "models/parallel_state.h"
#include "models/process_group.h"

namespace ferry::trainer {

class P2PCommunicator {
 public:
  // Called by all ranks of the mesh, which outlives it. `interleaved`: the last stage hands
  // activations to the first one.
  P2PCommunicator(models::World& world,
                  const models::ParallelState& mesh,
                  const std::string& name,
                  bool interleaved);

  // Of tensors that nobody touches before they were waited for.
  models::Pending send_forward(const at::Tensor& activations) const {
    return send(forward_out_, activations);
  }
  models::Pending recv_forward(const at::Tensor& activations) const {
    return receive(forward_in_, activations);
  }
  models::Pending send_backward(const at::Tensor& gradient) const {
    return send(backward_out_, gradient);
  }
  models::Pending recv_backward(const at::Tensor& gradient) const {
    return receive(backward_in_, gradient);
  }

 private:
  // Two ranks: the other one is 1 - rank().
  using Channel = std::unique_ptr<models::ProcessGroup>;
  static models::Pending send(const Channel& channel, const at::Tensor& tensor);
  static models::Pending receive(const Channel& channel, const at::Tensor& tensor);

  Channel forward_in_, forward_out_, backward_in_, backward_out_;
};

}  // namespace ferry::trainer
