// An option that would change nothing of the conversion's target is an error: the user who gave it
// expects another target.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "converter/convert.h"
#include "distckpt/base/dtype.h"
#include "models/spec/parallel_config.h"

namespace ferry::converter {

// Throws Error(kUsage) naming the option, where it has no effect from `source` to `target`, or
// contradicts another.
void require_effective(const ConvertOptions& options, const Checkpoint& source, Format target);

// Throws Error(kUsage) naming the options of another layout than one rank's, which have no effect
// on `target`: "a PEFT adapter"; and those of `given`, whatever they say.
void require_no_layout(const models::ParallelConfig& parallel,
                       std::string_view target,
                       const std::vector<std::string>& given = {});

// kBF16, kF16 or kF32 of "bf16", "fp16", "fp32", and of the names that torch, NumPy, vLLM and
// safetensors have: "bfloat16", "half", "float16", "F16", "float32", ... Nothing for others.
std::optional<distckpt::DType> weight_dtype(std::string_view name);

}  // namespace ferry::converter
