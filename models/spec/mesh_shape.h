// The shape of a mesh and the place of each of its ranks, numbered as Megatron-Core numbers them
// (parallel_state.py, order tp-cp-ep-dp-pp): tensor parallel fastest, pipeline slowest; experts
// have a numbering of their own within a stage.
#pragma once

#include "models/spec/parallel_config.h"

namespace ferry::models {

// The place of a rank on each axis.
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

}  // namespace ferry::models
