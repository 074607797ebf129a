// The training arguments that Megatron-LM keeps in a checkpoint's common state, to and from a
// TransformerConfig.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "distckpt/base/dtype.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "models/spec/parallel_config.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

inline constexpr std::string_view kArgumentsNamespace = "argparse.Namespace";
inline constexpr std::int64_t kMambaKernel = 4;            // of MambaMixer's convolution, d_conv
inline constexpr auto kGatedDeltaNet = "gated_delta_net";  // an experimental_attention_variant

// The parts of a training run that a checkpoint to be written holds.
struct WrittenState {
  distckpt::DType dtype = distckpt::DType::kBF16;  // of most of the model
  std::int64_t iteration = 0;
  bool optimizer = false;
  bool rng = false;
};

// Emits the Namespace of arguments that Megatron-LM's loader reads (load_checkpoint,
// --use-checkpoint-args). `carried` are the arguments of another checkpoint of this model: all are
// kept but those that the layout and `written` decide.
void write_args(distckpt::PickleWriter& pickle,
                const models::TransformerConfig& config,
                const models::ParallelConfig& parallel,
                const WrittenState& written,
                std::optional<distckpt::PickleValue> carried);

// N, where layers look at the sliding window alone (true) but for every N-th, as Megatron-LM's
// --window-attn-skip-freq counts them; nothing where no number says it.
std::optional<std::int64_t> period_of_windows(const std::vector<bool>& sliding);

// The Namespace of arguments in a common state.
std::optional<distckpt::PickleValue> find_args(distckpt::PickleValue common_state);

// The arguments that JSON has: numbers, words, none, and lists of them.
nlohmann::ordered_json plain_args(distckpt::PickleValue args);

// The model that a common state's arguments describe; nothing if it has none. vocab_size is 0 where
// they do not say it.
std::optional<models::TransformerConfig> read_args(distckpt::PickleValue common);

// The parallel layout that a common state's arguments describe; nothing if it has none.
std::optional<models::ParallelConfig> read_parallel_args(distckpt::PickleValue common);

// Throws Error(kCorrupt) naming the field in which arguments and configuration contradict each
// other.
void require_same_model(const models::TransformerConfig& args,
                        const models::TransformerConfig& config,
                        std::string_view args_source,
                        std::string_view config_source);

}  // namespace ferry::converter
