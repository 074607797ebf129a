// The tower of a model that also sees (its vision model and projector), in a Megatron checkpoint.
// Rules name its tensors beside Hugging Face's, one list for each layout in which trainers keep
// such models, and one for a tower that is computed, whose parameters are in the table
// (models/spec).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "converter/families/model_map.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/sharded_tensor.h"
#include "distckpt/plan/tensor_map.h"

namespace ferry::converter {

// The place of a model that also sees, or of its gated delta nets, in a Megatron checkpoint. Other
// models have the first one.
enum class MegatronLayout : std::uint8_t {
  kLanguageModel,   // the language model's keys as they are; the tower beside it, in the sidecar
  kMegatronBridge,  // Megatron-Bridge's: keys below "language_model.", the tower beside them
  kMbridge,         // mbridge's: the same, with another tower, but for families of one in both
  kSlime,           // the first, but for delta nets: open/slime_layout.h
};

inline constexpr std::string_view kLanguageModelPrefix = "language_model.";

// True if the tower of a model that also sees is in the checkpoint, beside a language model below a
// prefix.
bool keeps_tower(MegatronLayout layout);

std::string_view layout_name(MegatronLayout layout);  // "megatron-bridge"
std::optional<MegatronLayout> megatron_layout(std::string_view name);

// The layout that a checkpoint of the family has if `layout` was asked for: Megatron-Bridge's for
// mbridge's, where both keep its tower alike.
MegatronLayout written_layout(const Family& family, MegatronLayout layout);

// A key without wrappers and the prefix of a language model in one that also sees.
std::string_view language_model_key(std::string_view key);

// True if a key or an object's key is of the family's tower, in a layout that keeps it there.
bool is_tower_key(const Family& family, std::string_view key);

// The layout of a checkpoint with these keys.
MegatronLayout layout_of(const Family& family, const distckpt::Layout& stored);

// Tensors of the tower, in Hugging Face terms, that a stored checkpoint holds. Throws
// Error(kLayout) for one of a shape that no rule makes.
std::vector<distckpt::ModelTensor> tower_tensors(const Family& family,
                                                 MegatronLayout layout,
                                                 const distckpt::Layout& stored);

// A tower's tensors, and the `_extra_state`s of its modules that are Transformer Engine's.
struct TowerState {
  std::vector<distckpt::ShardedTensor> tensors{};
  std::vector<distckpt::ShardedObject> extra_states{};
};

// The tower in a checkpoint to be written, which rank 0 holds whole. `tensors` are all of the
// model's, of which the carried ones are the tower's. Throws Error(kUsage | kLayout) where the
// family has no such layout, or the layout no place for a tensor.
TowerState tower_state(const ModelMap& map,
                       MegatronLayout layout,
                       const std::vector<distckpt::ModelTensor>& tensors,
                       std::int64_t num_heads);

// Links the stored tensors of the tower to those of `tensors`.
void link_tower(const ModelMap& map,
                MegatronLayout layout,
                const std::vector<distckpt::ModelTensor>& tensors,
                std::int64_t num_heads,
                const distckpt::Layout& stored,
                distckpt::TensorMap& links);

// The Hugging Face name of a parameter of a tower that is computed, by the first rule that fits;
// nothing if none does.
std::optional<std::string> tower_name(std::span<const TowerRule> rules, std::string_view key);

// The heads of the tower that config.json names; 0 if it names none.
std::int64_t tower_heads(std::string_view config_text, std::string_view source);

}  // namespace ferry::converter
