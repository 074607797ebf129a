// Settings of a model that are one of a few, under their names in config.json and in Megatron's
// arguments. The tables read and print them; everything else compares values.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "distckpt/base/named.h"

namespace ferry::models {

// hidden_act of config.json.
enum class Activation : std::uint8_t {
  kSilu,
  kGeluTanh,    // the approximation of gelu by tanh
  kQuickGeglu,  // GPT-OSS's, Megatron-Core's argument of this name
  kSquaredRelu,
};
inline constexpr auto kActivations =
    std::to_array<Named<Activation>>({{"silu", Activation::kSilu},
                                      {"gelu_pytorch_tanh", Activation::kGeluTanh},
                                      {"quick_geglu", Activation::kQuickGeglu},
                                      {"relu2", Activation::kSquaredRelu}});

// moe_router_score_function: what makes the scores of experts of a router's logits.
enum class ScoreFunction : std::uint8_t { kSoftmax, kSigmoid };
inline constexpr auto kScoreFunctions = std::to_array<Named<ScoreFunction>>(
    {{"softmax", ScoreFunction::kSoftmax}, {"sigmoid", ScoreFunction::kSigmoid}});

// rope_type of transformers' rope_parameters.
enum class RopeType : std::uint8_t {
  kDefault,  // positions are not scaled
  kLinear,
  kDynamic,
  kYarn,
  kLongrope,
  kLlama3,
  kProportional,
};
inline constexpr auto kRopeTypes =
    std::to_array<Named<RopeType>>({{"default", RopeType::kDefault},
                                    {"linear", RopeType::kLinear},
                                    {"dynamic", RopeType::kDynamic},
                                    {"yarn", RopeType::kYarn},
                                    {"longrope", RopeType::kLongrope},
                                    {"llama3", RopeType::kLlama3},
                                    {"proportional", RopeType::kProportional}});

constexpr std::string_view name_of(Activation activation) {
  return name_in(kActivations, activation);
}
constexpr std::string_view name_of(ScoreFunction function) {
  return name_in(kScoreFunctions, function);
}
constexpr std::string_view name_of(RopeType type) {
  return name_in(kRopeTypes, type);
}

}  // namespace ferry::models
