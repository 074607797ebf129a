// The assignment of layers to pipeline stages. Interleaved stages hold several chunks of layers,
// handed out in turn; stages may be uneven, or given by a layout text.
#pragma once

#include <vector>

#include "models/spec/parallel_config.h"

namespace ferry::models {

struct PipelineStages {
  int embedding = 0;
  std::vector<int> layers{};        // stage of each decoder layer
  std::vector<int> layer_chunks{};  // and which of the stage's chunks has it
  std::vector<int> mtp{};           // stage of each prediction layer
  std::vector<int> mtp_chunks{};
  int loss = 0;        // stage of the final norm and the output layer
  int num_chunks = 1;  // of each stage: the embedding lies in its first, the loss in its last
};

// Throws Error(kUsage) if the layers cannot be shared out so (Megatron-Core
// transformer_layer.get_transformer_layer_offset, pipeline_parallel_layer_layout).
PipelineStages pipeline_stages(const ParallelConfig& parallel, int num_layers, int mtp_num_layers);

}  // namespace ferry::models
