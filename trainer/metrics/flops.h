// How many floating-point operations a step takes by verl's count, and what share of a GPU's peak
// that is: metrics perf/mfu/* that can be compared with verl's.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "models/spec/transformer_config.h"

namespace ferry::trainer {

// Forward and backward, without what is recomputed (verl: utils/flops_counter.py): six a token and
// weight that the token meets, the embedding and the output layer included; and for attention,
// causal, 3 (query + value size) of each head by the squares of the lengths. (Of multi-latent
// attention verl counts the query size for that of the values, too.)
double training_flops(const models::TransformerConfig& config,
                      std::span<const std::int64_t> lengths);

// Of one GPU, dense and in bf16, a second; nothing for one that is not known. `device` is the name
// that CUDA gives it: "NVIDIA H100 80GB HBM3".
std::optional<double> peak_flops(std::string_view device);

}  // namespace ferry::trainer
