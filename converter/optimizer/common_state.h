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

// Of the checkpoint that another one is made of.
struct CarriedState {
  distckpt::PickleValue common;  // its common state, a dict
  // Dicts with the `param_groups` of its optimizer, or of its dense and its expert optimizer. None:
  // the state of the optimizer stays behind.
  std::vector<distckpt::PickleValue> optimizers{};
};

// Emits it as a dict. Without `carried` it is that of weights alone.
void write_common_state(distckpt::PickleWriter& pickle,
                        const models::TransformerConfig& config,
                        const models::ParallelConfig& parallel,
                        const WrittenState& written,
                        const std::optional<CarriedState>& carried);

}  // namespace ferry::converter
