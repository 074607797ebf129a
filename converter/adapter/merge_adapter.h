// A checkpoint with a LoRA adapter merged into it, as the source of a conversion: W + scaling B A
// in fp32, rounded once to the dtype of W.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "converter/convert.h"

namespace ferry::converter {

// An adapter of PEFT, verl or Megatron-Bridge.
struct AdapterToMerge {
  std::filesystem::path path{};
  std::optional<double> alpha{};  // OpenAdapterOptions::alpha
  bool allow_vanished = false;    // with ConvertOptions::keep_quantized: whatever FP8 leaves of it
};

struct MergeReport {
  ConvertReport converted{};
  std::int64_t num_tensors = 0;   // that the adapter changes
  std::int64_t num_elements = 0;  // of these; of what an interrupted run did, nothing is counted
  std::int64_t num_changed = 0;
  std::int64_t num_vanished = 0;  // elements that a change other than zero left as they were
  std::int64_t num_rescaled = 0;  // blocks of FP8 that got another scale
};

// Converts options.from, changed by the adapter. Blocks of FP8 are dequantised, or, with
// keep_quantized, changed in fp32 and quantised again by the scales that they have. Throws as
// convert() does, Error(kLayout) for a tensor that the base lacks or that is of another shape, and
// Error(kUsage) where FP8 keeps less than half of the elements' changes, or none.
MergeReport merge_adapter(ConvertOptions options,
                          const AdapterToMerge& adapter,
                          const ProgressFunction& progress = {});

}  // namespace ferry::converter
