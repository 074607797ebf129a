// The part of each parameter that a rank of a mesh holds, as boxes of the whole: a pure function of
// the model's configuration, the mesh and the numerical mode, so that every rank, and a converter
// that has none, knows what all ranks hold. Keys are Megatron-Core's, one per layer and per expert.
//
// kFast splits as Megatron does. kBitwise splits linear_proj and linear_fc2 by rows of their output
// instead of by columns: then no sum ever crosses ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/plan/sharded_tensor.h"
#include "models/spec/alignment.h"
#include "models/spec/mesh_shape.h"
#include "models/spec/parameters.h"
#include "models/spec/transformer_config.h"

namespace ferry::models {

// The relation of a parameter to the ranks beside it.
enum class Sharing : std::uint8_t {
  kSharded,     // tensor parallel ranks hold different parts
  kReplicated,  // all of them hold it whole
};

struct ParameterSpec {
  std::string key{};  // "decoder.layers.3.mlp.linear_fc1.weight"
  distckpt::DType dtype = distckpt::DType::kBF16;
  distckpt::Shape shape{};         // [2 ffn/tp, hidden], as it lies in this rank's memory
  distckpt::Shape global_shape{};  // [2 ffn, hidden]; the vocabulary padded
  // The boxes of the whole tensor that lie in `shape` one after another along its first dimension:
  // one, or the gate's part and the up projection's.
  std::vector<distckpt::Box> boxes{};
  std::vector<int> replica_id{};  // (copy of a tied embedding, tensor parallel, data parallel)
  Sharing sharing = Sharing::kReplicated;
  bool expert = false;      // shared over the expert data parallel group
  std::int64_t vocab = -1;  // rows from here on are padding; -1: it has none
  bool trained = true;      // a router's bias is not, by gradients

  std::vector<distckpt::ShardedTensor> sharded_tensors() const;
};

struct LayoutOptions {
  Alignment alignment = Alignment::kFast;
  distckpt::DType dtype = distckpt::DType::kBF16;  // of everything but a router's bias
  // The stage that has the embedding also has the vision tower, of a model whose tower is computed:
  // to train it.
  bool vision_tower = false;
};

// The cut of a parameter by tensor parallel ranks: equal pieces of dimension `dim` of each of
// `parts` equal parts of it.
struct Cut {
  int dim = 0;
  int parts = 1;

  // The boxes of rank `rank` of `ranks`, which divide the parts.
  std::vector<distckpt::Box> boxes(const distckpt::Shape& shape, int rank, int ranks) const;
};
std::optional<Cut> cut_of(const WholeParameter& parameter, Alignment alignment);

// The part of a parameter that the rank at `at` holds; nothing of another rank's expert. Throws
// Error(kUsage) if it cannot be split so.
std::optional<ParameterSpec> shard(const WholeParameter& parameter,
                                   const TransformerConfig& config,
                                   const MeshShape& mesh,
                                   const MeshCoordinates& at,
                                   const LayoutOptions& options);

// The place of a stage's modules.
struct StageSpec {
  int stage = 0;
  int chunk = 0;                       // of the stage's chunks, where stages are interleaved
  bool pre_process = false;            // it has the embedding
  bool post_process = false;           // it has the final norm and the output layer
  std::vector<std::int64_t> layers{};  // global indices
  std::vector<std::int64_t> mtp{};
};

// The chunks of a stage, first to last. Throws Error(kUsage) if the layers cannot be shared out.
std::vector<StageSpec> stage_chunks(const TransformerConfig& config,
                                    const ParallelConfig& parallel,
                                    int stage);

// The stages that hold the embedding, first to last: beside its own, those of prediction layers and
// of a tied output layer.
std::vector<int> embedding_stages(const TransformerConfig& config, const ParallelConfig& parallel);

// The parameters that a rank holds of one chunk, in the order of the modules. Throws Error(kUsage)
// if the model cannot be split so, or its vision tower not be trained on such stages.
std::vector<ParameterSpec> parameter_layout(const TransformerConfig& config,
                                            const MeshShape& mesh,
                                            const MeshCoordinates& at,
                                            const StageSpec& stage,
                                            const LayoutOptions& options);

// The parameters of a vision tower, which every rank holds whole.
std::vector<ParameterSpec> vision_layout(const TransformerConfig& config,
                                         const MeshShape& mesh,
                                         const MeshCoordinates& at,
                                         const LayoutOptions& options);

// Sizes of a mesh that have to divide sizes of a model.
enum class MeshSize : std::uint8_t { kTp, kEp, kEtp };
std::string_view name_of(MeshSize size);  // "tp", "ep", "etp"

// A size of a mesh that does not divide what it has to.
struct Indivisible {
  MeshSize size = MeshSize::kTp;
  std::string what{};  // "4 attention heads"
};

// The first one, if there is any.
std::optional<Indivisible> find_indivisible(const TransformerConfig& config,
                                            const ParallelConfig& parallel,
                                            Alignment alignment);

// Throws Error(kUsage) naming the size if the modules of a model cannot be split over a mesh:
// heads, query groups, widths, experts, layers.
void check_fits(const TransformerConfig& config, const MeshShape& mesh);

}  // namespace ferry::models
