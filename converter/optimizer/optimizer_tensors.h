// The optimizer's tensors in model space: for each trained parameter one tensor of its shape per
// kind of state ("param" is the fp32 master). Megatron-Core's checkpoints keep them so
// (fully_reshardable), in blocks of flattened shards (fully_sharded_model_space), or in the flat
// buckets of each model parallel rank (dp_reshardable, dp_zero_gather_scatter): whatever it is, it
// becomes a layout of boxes here. Source: megatron/core/optimizer/distrib_optimizer.py.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "converter/families/model_map.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/tensor_map.h"
#include "models/spec/parallel_config.h"

namespace ferry::converter {

inline constexpr std::string_view kStatePrefix = "optimizer.state.";

// The tensors of one kind as a model of their own: keys with "optimizer.state.<kind>." before them,
// one tensor in Megatron's terms for each parameter that is trained. Routers' biases are not, a
// vision tower may be.
ModelMap optimizer_map(const ModelMap& map, std::string_view kind);

// Links the optimizer's tensors in `layout`, kind after kind; the model's tensors that they are
// number from `first` on. Throws Error(kLayout) as link_megatron does.
void link_optimizer(const ModelMap& map,
                    const std::vector<std::string>& kinds,
                    std::uint32_t first,
                    const distckpt::Layout& layout,
                    distckpt::TensorMap& links);

// The kinds of the optimizer's tensors in a layout that names them so. Throws Error(kLayout) for
// one that is not known.
std::vector<std::string> optimizer_kinds(const distckpt::Layout& layout);

struct OptimizerTensors {
  std::string form{};                // param_state_sharding_type
  std::vector<std::string> kinds{};  // "exp_avg", "exp_avg_sq", "param"
};

// Adds the optimizer's tensors of a checkpoint to `layout`, which holds those of the model, under
// the keys of the fully_reshardable form, and to `tensors` and `links`, kind after kind. `parallel`
// is the layout of the run that wrote it. `form` is what the checkpoint says, if it does. Throws
// Error(kLayout | kCorrupt) for state that cannot be brought into model space, by name.
OptimizerTensors add_optimizer_tensors(const distckpt::TorchDistCheckpoint& checkpoint,
                                       const ModelMap& map,
                                       const models::ParallelConfig& parallel,
                                       std::string_view form,
                                       distckpt::Layout& layout,
                                       distckpt::TensorMap& links,
                                       std::vector<distckpt::ModelTensor>& tensors,
                                       std::vector<distckpt::ExpectedChecksum>& checksums);

}  // namespace ferry::converter
