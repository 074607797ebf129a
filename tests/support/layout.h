// Meshes that a claim is tried on.
#pragma once

#include "models/spec/parallel_config.h"

namespace ferry::support {

struct Layout {
  const char* name;
  int ranks;
  models::ParallelConfig parallel{};
  bool sequence_parallel = false;
};

// One rank, and every axis that cuts sequences or a batch.
inline const Layout kLayouts[] = {
    {"alone", 1},
    {"tp2 pp2", 4, {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}},
    {"cp2 dp2", 4, {.context_parallel_size = 2}},
    {"sequence parallel", 2, {.tensor_model_parallel_size = 2}, true}};

}  // namespace ferry::support
