// The training arguments that Megatron-LM keeps in a checkpoint's common state, to and from a
// TransformerConfig.
#pragma once

#include <optional>

#include "distckpt/dtype.h"
#include "distckpt/filenames.h"
#include "distckpt/parallel_config.h"
#include "distckpt/pickle.h"
#include "distckpt/pickle_writer.h"
#include "distckpt/transformer_config.h"

namespace ferry::converter {

// Emits the common state of a checkpoint of weights: iteration, checkpoint_version,
// content_metadata and the arguments that Megatron-LM's loader reads (load_checkpoint,
// --use-checkpoint-args).
void write_common_state(distckpt::PickleWriter& pickle,
                        const distckpt::TransformerConfig& config,
                        const distckpt::ParallelConfig& parallel,
                        distckpt::DType dtype,
                        const distckpt::Iteration& iteration);

// The model that a common state's arguments describe; nothing if it has none. vocab_size is 0 where
// they do not say it.
std::optional<distckpt::TransformerConfig> read_args(distckpt::PickleValue common);

// The parallel layout that they describe; nothing if there are none.
std::optional<distckpt::ParallelConfig> read_parallel_args(distckpt::PickleValue common);

// Throws Error(kCorrupt) naming the field in which arguments and configuration contradict each
// other.
void require_same_model(const distckpt::TransformerConfig& args,
                        const distckpt::TransformerConfig& config,
                        std::string_view args_source,
                        std::string_view config_source);

}  // namespace ferry::converter
