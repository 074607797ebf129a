// The module of a model where the first value arose that is not finite: found in one more forward
// pass over the batch that went wrong.
#pragma once

#include <cstdint>
#include <string>

#include "models/distributed/process_group.h"
#include "models/transformer/layer_context.h"

namespace ferry::trainer {

class FiniteOutputs {
 public:
  // For every forward pass of this rank's chunks; outlives what it returns.
  models::Observer observer();

  // The first module of the model whose output was not finite, over all ranks of the group:
  // "decoder.layers.3.mlp"; empty if all were.
  std::string first(const models::ProcessGroup& all) const;

 private:
  std::int64_t num_seen_ = 0;
  std::string first_{};  // place of this rank (first_place.h)
};

}  // namespace ferry::trainer
