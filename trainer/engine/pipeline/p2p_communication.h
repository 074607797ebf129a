// Messages between pipeline stages: activations to the next one, gradients to the one before.
// Two stages have one communicator, and begin at the same place of the schedule what goes to and
// fro between them (Megatron-Core p2p_communication.py, batch_p2p_comm).
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "models/distributed/parallel_state.h"
#include "models/distributed/process_group.h"

namespace ferry::trainer {

class P2PCommunicator {
 public:
  // Called by all ranks of the mesh, which outlives it. `interleaved`: the last stage hands
  // activations to the first one.
  P2PCommunicator(models::World& world,
                  const models::ParallelState& mesh,
                  const std::string& name,
                  bool interleaved);

  // Begins these messages, whose `peer` is a stage next to this one; called by both stages of each.
  // Returns a wait for each of those stages, before which nobody touches the tensors.
  std::vector<std::pair<int, models::Pending>> exchange(
      const std::vector<models::P2POp>& messages) const;

 private:
  struct Neighbour {
    int stage = 0;
    models::ProcessGroup channel;  // of two ranks
  };
  // All stages come to their channels in one order, so that none waits in a circle.
  std::vector<Neighbour> neighbours_;
};

}  // namespace ferry::trainer
