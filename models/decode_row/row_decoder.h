// Generation for one sequence at a time, in kFast: a dense model's layers for one row, in one
// kernel (models/decode_row/decode_row.cu). Products of one row are too short, one by one, to bring
// a GPU's memory to full speed, and their weights are all there is to read. It computes the same
// layers as transformer/: a row's results differ from theirs by roundings of sums.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "models/distributed/parallel_state.h"
#include "models/kernels/rms_norm.h"
#include "models/kernels/rotary.h"
#include "models/spec/alignment.h"
#include "models/spec/transformer_config.h"
#include "models/tensor_parallel/parameters.h"
#include "models/transformer/inference_context.h"

namespace ferry::models {

class RowDecoder {
 public:
  // Returns null unless the model is dense, in bf16, without pipeline stages, of sizes that the
  // kernel supports, and computes in kFast. Parameters and mesh must outlive the decoder; the
  // parameters' memory may move.
  static std::unique_ptr<RowDecoder> make(const TransformerConfig& config,
                                          const ParallelState& mesh,
                                          Alignment alignment,
                                          const Parameters& parameters);

  // True if the row's tensors and its cache have the layout that the kernel reads, and tensor
  // parallel ranks have mapped each other's memory (ProcessGroup::map_peer_memory()).
  bool takes(const DecodedRow& row) const;
  // hidden [1, hidden] is the embedding of the row. Also stores the row's keys and values in the
  // cache. Reads nothing back to the host. Only one pass may run at a time. Called by all tensor
  // parallel ranks.
  ResidualStream forward(const at::Tensor& hidden,
                         const RotaryAngles& angles,
                         const DecodedRow& row) const;

 private:
  RowDecoder(const TransformerConfig& config,
             const ProcessGroup& tp,
             const Parameters& parameters,
             at::Tensor exchange);
  // Null where a layer has none.
  const void* weight(std::int64_t layer, const char* name) const;

  const TransformerConfig& config_;
  const ProcessGroup& tp_;
  const Parameters& parameters_;
  at::Tensor exchange_;  // in which the kernel's thread blocks pass on results; kept over launches
};

}  // namespace ferry::models
