// The mesh: which ranks of a run share what, and this rank's place in it. An object, passed and
// never global, so that meshes of different shapes live side by side, over the same ranks or over
// others.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/distributed/process_group.h"
#include "models/spec/mesh_shape.h"

namespace ferry::models {

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
