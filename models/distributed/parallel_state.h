// The mesh: the parallel groups of the ranks of a run, and this rank's place in them. It is an
// object that is passed, never global, so that meshes of different shapes live side by side, over
// the same ranks or over others.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/distributed/process_group.h"
#include "models/spec/mesh_shape.h"

namespace ferry::models {

class ParallelState {
 public:
  // Called by all of `ranks` (numbers in the world, ascending; empty: all of them) and by no
  // others. Ranks make several meshes in the same order; `name` is unique among meshes. Throws
  // Error(kUsage) if the parallel sizes do not divide the number of ranks. The world must outlive
  // the mesh.
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
  const ProcessGroup& dp_cp() const { return dp_cp_; }  // holds copies of the dense parameters
  const ProcessGroup& pp() const { return pp_; }
  const ProcessGroup& ep() const { return ep_; }
  const ProcessGroup& etp() const { return etp_; }
  const ProcessGroup& edp() const { return edp_; }  // holds copies of an expert's parameters

  bool is_last_stage() const { return coordinates_.pp == shape_.pp() - 1; }

 private:
  World* world_;
  std::vector<int> ranks_;
  MeshShape shape_;
  MeshCoordinates coordinates_;
  ProcessGroup all_, tp_, cp_, dp_, dp_cp_, pp_, ep_, etp_, edp_;
};

}  // namespace ferry::models
