// The two numerical modes, behind one interface of every layer (docs/numerics.md).
#pragma once

#include <cstdint>

namespace ferry::models {

enum class Alignment : std::uint8_t {
  kFast,     // Megatron's way: row-parallel sums across ranks, the best kernel for each shape
  kBitwise,  // one function of (weights, tokens): the bits do not depend on batch, packing or mesh,
             // and are those of Hugging Face transformers
};

}  // namespace ferry::models
