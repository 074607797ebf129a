// run_config.yaml, without which Megatron-Bridge does not open a Megatron checkpoint: the fields of
// the provider that makes its model, out of Megatron-LM's arguments and of what the family's file
// says of that model (families/bridge_model.h).
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "converter/open/checkpoint.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

inline constexpr std::string_view kRunConfig = "run_config.yaml";

// The reason why Megatron-Bridge cannot make this model of a run_config.yaml; nothing if it can.
// `layout`: kMegatronBridge is that of a model that also sees.
std::optional<std::string> run_config_problem(
    const models::TransformerConfig& config,
    MegatronLayout layout = MegatronLayout::kLanguageModel);
// The same for tensors that are written in a layout, or in part.
std::optional<std::string> run_config_problem(const Checkpoint& source, MegatronLayout layout);

// The layout of a Megatron checkpoint of this model that Megatron-Bridge opens: that of one which
// is there, else the one in which Megatron-Bridge keeps models of the family.
MegatronLayout bridge_layout(const Checkpoint& source);

// Its text, for a model without a problem. `args` is the Namespace of arguments in the checkpoint
// that it is for, `config` the model in it; `hf_model_id` the model that this one was imported
// from, or ""; `hf_config` the config.json of a model that also sees, in Megatron-Bridge's layout,
// else "".
std::string run_config_text(distckpt::PickleValue args,
                            const models::TransformerConfig& config,
                            const std::string& hf_model_id,
                            std::string_view hf_config = {});

// The same of a checkpoint's model, in a layout.
std::string run_config_text(distckpt::PickleValue args,
                            const Checkpoint& source,
                            MegatronLayout layout,
                            const std::string& hf_model_id);

// Writes that of a torch_dist checkpoint beside its files; another one is replaced. Returns its
// path. Throws Error(kUsage) for a checkpoint of another format, one without arguments, or one that
// has a problem.
std::filesystem::path write_run_config(const Checkpoint& checkpoint,
                                       const std::string& hf_model_id);

}  // namespace ferry::converter
