// The mesh: which ranks of a run share what, and this rank's place in it. An object, passed and
// never global, so that meshes of different shapes live side by side, over the same ranks or over
// others.
//
// The ranks of a mesh are numbered as Megatron-Core numbers them (parallel_state.py, order
// tp-cp-ep-dp-pp): tensor parallel fastest, pipeline slowest; experts have a numbering of their own
// within a stage.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/distributed/process_group.h"
#include "models/spec/parallel_config.h"
#include "models/spec/transformer_config.h"

namespace ferry::models {

// Where a rank stands on each axis.
struct MeshCoordinates {
  int tp = 0;
  int cp = 0;
  int dp = 0;
  int pp = 0;
  int etp = 0;  // of the experts
  int ep = 0;
  int edp = 0;

  bool operator==(const MeshCoordinates&) const = default;
};

// The shape of a mesh over `world_size` ranks: data parallel sizes are what remains.
class MeshShape {
 public:
  // Throws Error(kUsage) if the sizes do not divide the world.
  MeshShape(ParallelConfig parallel, int world_size);

  const ParallelConfig& parallel() const { return parallel_; }
  int world_size() const { return world_size_; }
  int tp() const { return parallel_.tensor_model_parallel_size; }
  int cp() const { return parallel_.context_parallel_size; }
  int pp() const { return parallel_.pipeline_model_parallel_size; }
  int ep() const { return parallel_.expert_model_parallel_size; }
  int etp() const { return parallel_.expert_tensor_parallel(); }
  int dp() const { return world_size_ / (tp() * cp() * pp()); }
  int edp() const { return world_size_ / (etp() * ep() * pp()); }

  MeshCoordinates coordinates(int rank) const;

 private:
  ParallelConfig parallel_;
  int world_size_ = 1;
};

// Throws Error(kUsage) naming the sizes if a model cannot be split so: heads, query groups, widths,
// experts, layers.
void check_fits(const TransformerConfig& config, const MeshShape& mesh);

class ParallelState {
 public:
  // Called by all of `ranks` (of the world, ascending; none: all), and no others, in the same order
  // as other meshes; `name` tells meshes apart. Throws Error(kUsage) if the sizes do not divide
  // them.
  ParallelState(World& world,
                const ParallelConfig& parallel,
                const std::string& name,
                std::vector<int> ranks = {});

  const MeshShape& shape() const { return shape_; }
  const MeshCoordinates& coordinates() const { return coordinates_; }
  const World& world() const { return *world_; }

  const ProcessGroup& all() const { return all_; }  // every rank of the mesh
  const ProcessGroup& tp() const { return tp_; }
  const ProcessGroup& cp() const { return cp_; }
  const ProcessGroup& dp() const { return dp_; }
  const ProcessGroup& dp_cp() const { return dp_cp_; }  // that share dense parameters
  const ProcessGroup& pp() const { return pp_; }
  const ProcessGroup& ep() const { return ep_; }
  const ProcessGroup& etp() const { return etp_; }
  const ProcessGroup& edp() const { return edp_; }  // that share an expert's parameters

  bool is_first_stage() const { return coordinates_.pp == 0; }
  bool is_last_stage() const { return coordinates_.pp == shape_.pp() - 1; }

 private:
  World* world_;
  std::vector<int> ranks_;
  MeshShape shape_;
  MeshCoordinates coordinates_;
  ProcessGroup all_, tp_, cp_, dp_, dp_cp_, pp_, ep_, etp_, edp_;
};

}  // namespace ferry::models
