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
};

struct MergeReport {
  ConvertReport converted{};
  std::int64_t num_tensors = 0;   // that the adapter changes
  std::int64_t num_elements = 0;  // of these; of what an interrupted run did, nothing is counted
  std::int64_t num_changed = 0;
  std::int64_t num_vanished = 0;  // elements that a change other than zero left as they were
};

// Converts options.from, changed by the adapter; blocks of FP8 are dequantised. Throws as convert()
// does, and Error(kLayout) for a tensor that the base lacks or that is of another shape.
MergeReport merge_adapter(ConvertOptions options,
                          const AdapterToMerge& adapter,
                          const ProgressFunction& progress = {});

}  // namespace ferry::converter
