// Linear attention by a gated delta net (Qwen3-Next, Qwen3.5; Megatron-Core
// ssm/gated_delta_net.py): queries, keys and values pass a short convolution, the gated delta rule
// reads and writes the state, and a norm with a gate follows. Tensor parallel ranks hold different
// key heads, and the value heads that belong to them. Context parallel ranks project their own
// tokens, and compute all tokens of a share of these heads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "models/transformer/attention.h"

namespace ferry::models {

// `prefix`: "decoder.layers.3.". `layer`: 3, by which generation finds its states.
std::unique_ptr<Attention> make_gated_delta_net(const ModelSetup& setup,
                                                Parameters& parameters,
                                                const std::string& prefix,
                                                std::int64_t layer);

}  // namespace ferry::models
