// The common state of a Megatron checkpoint: everything that is neither a sharded tensor nor a
// sharded object. Arguments, iteration, and of a training run the scheduler and the optimizer's
// parameter groups.
#pragma once

#include <optional>
#include <vector>

#include "converter/families/megatron_args.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "models/spec/parallel_config.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

// The state that a new checkpoint takes over from the one that it is made of.
struct CarriedState {
  distckpt::PickleValue common;  // the common state, a dict
  // Dicts with the `param_groups` of the optimizer, or of the dense and the expert optimizer.
  // Empty: the state of the optimizer is not taken over.
  std::vector<distckpt::PickleValue> optimizers{};
};

// Emits the common state of a new checkpoint as a dict. Without `carried` it is that of a
// checkpoint without optimizer.
void write_common_state(distckpt::PickleWriter& pickle,
                        const models::TransformerConfig& config,
                        const models::ParallelConfig& parallel,
                        const WrittenState& written,
                        const std::optional<CarriedState>& carried);

}  // namespace ferry::converter
