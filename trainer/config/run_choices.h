// The settings of every kind of run that are one of a few.
#pragma once

#include <array>
#include <cstdint>

#include "distckpt/base/dtype.h"
#include "models/spec/alignment.h"
#include "models/spec/recompute.h"
#include "trainer/config/choice.h"

namespace ferry::trainer {

template <>
inline constexpr auto kChoices<models::Alignment> = std::to_array<Named<models::Alignment>>(
    {{"fast", models::Alignment::kFast}, {"bitwise", models::Alignment::kBitwise}});

// torch's names, which are written, and the short ones that verl has in some places.
template <>
inline constexpr auto kChoices<distckpt::DType> =
    std::to_array<Named<distckpt::DType>>({{"bfloat16", distckpt::DType::kBF16},
                                           {"float16", distckpt::DType::kF16},
                                           {"float32", distckpt::DType::kF32},
                                           {"bf16", distckpt::DType::kBF16},
                                           {"fp16", distckpt::DType::kF16},
                                           {"fp32", distckpt::DType::kF32}});

template <>
inline constexpr auto kChoices<models::Recompute::Granularity> =
    std::to_array<Named<models::Recompute::Granularity>>(
        {{"none", models::Recompute::Granularity::kNone},
         {"full", models::Recompute::Granularity::kFull},
         {"selective", models::Recompute::Granularity::kSelective}});

using RecomputeModule = bool models::Recompute::Modules::*;
template <>
inline constexpr auto kChoices<RecomputeModule> =
    std::to_array<Named<RecomputeModule>>({{"core_attn", &models::Recompute::Modules::core_attn},
                                           {"mlp", &models::Recompute::Modules::mlp},
                                           {"moe", &models::Recompute::Modules::moe},
                                           {"moe_act", &models::Recompute::Modules::moe_act}});

template <>
inline constexpr auto kChoices<models::Recompute::Method> =
    std::to_array<Named<models::Recompute::Method>>({{"uniform",
                                                      models::Recompute::Method::kUniform},
                                                     {"block", models::Recompute::Method::kBlock}});

enum class LoadBalancingType : std::uint8_t { kNone, kAuxLoss, kSeqAuxLoss, kGlobalAuxLoss };
template <>
inline constexpr auto kChoices<LoadBalancingType> = std::to_array<Named<LoadBalancingType>>(
    {{"none", LoadBalancingType::kNone},
     {"aux_loss", LoadBalancingType::kAuxLoss},
     {"seq_aux_loss", LoadBalancingType::kSeqAuxLoss},
     {"global_aux_loss", LoadBalancingType::kGlobalAuxLoss}});

enum class LrDecayStyle : std::uint8_t { kConstant, kLinear, kCosine, kInverseSquareRoot, kWsd };
template <>
inline constexpr auto kChoices<LrDecayStyle> =
    std::to_array<Named<LrDecayStyle>>({{"constant", LrDecayStyle::kConstant},
                                        {"linear", LrDecayStyle::kLinear},
                                        {"cosine", LrDecayStyle::kCosine},
                                        {"inverse-square-root", LrDecayStyle::kInverseSquareRoot},
                                        {"WSD", LrDecayStyle::kWsd}});

enum class WsdDecayStyle : std::uint8_t { kLinear, kCosine, kExponential, kMinusSqrt };
template <>
inline constexpr auto kChoices<WsdDecayStyle> =
    std::to_array<Named<WsdDecayStyle>>({{"linear", WsdDecayStyle::kLinear},
                                         {"cosine", WsdDecayStyle::kCosine},
                                         {"exponential", WsdDecayStyle::kExponential},
                                         {"minus_sqrt", WsdDecayStyle::kMinusSqrt}});

enum class WdIncrStyle : std::uint8_t { kConstant, kLinear, kCosine };
template <>
inline constexpr auto kChoices<WdIncrStyle> =
    std::to_array<Named<WdIncrStyle>>({{"constant", WdIncrStyle::kConstant},
                                       {"linear", WdIncrStyle::kLinear},
                                       {"cosine", WdIncrStyle::kCosine}});

enum class ResumeMode : std::uint8_t { kAuto, kDisable, kResumePath };
template <>
inline constexpr auto kChoices<ResumeMode> =
    std::to_array<Named<ResumeMode>>({{"auto", ResumeMode::kAuto},
                                      {"disable", ResumeMode::kDisable},
                                      {"resume_path", ResumeMode::kResumePath}});

enum class DeviceKind : std::uint8_t { kCuda, kCpu };
template <>
inline constexpr auto kChoices<DeviceKind> =
    std::to_array<Named<DeviceKind>>({{"cuda", DeviceKind::kCuda}, {"cpu", DeviceKind::kCpu}});

enum class Logger : std::uint8_t { kConsole, kFile, kTensorboard, kWandb, kMlflow };
template <>
inline constexpr auto kChoices<Logger> =
    std::to_array<Named<Logger>>({{"console", Logger::kConsole},
                                  {"file", Logger::kFile},
                                  {"tensorboard", Logger::kTensorboard},
                                  {"wandb", Logger::kWandb},
                                  {"mlflow", Logger::kMlflow}});

enum class ProfilerTool : std::uint8_t { kNsys, kTorch };
template <>
inline constexpr auto kChoices<ProfilerTool> = std::to_array<Named<ProfilerTool>>(
    {{"nsys", ProfilerTool::kNsys}, {"torch", ProfilerTool::kTorch}});

enum class OnMalformed : std::uint8_t {
  kSkip,  // count the row, keep its name, take the next one instead
  kFail,  // throw
};
template <>
inline constexpr auto kChoices<OnMalformed> =
    std::to_array<Named<OnMalformed>>({{"skip", OnMalformed::kSkip}, {"fail", OnMalformed::kFail}});

// The tokens that a text which is too long loses: its first or its last ones, or none: an error.
enum class Truncation : std::uint8_t { kError, kLeft, kRight, kMiddle };
template <>
inline constexpr auto kChoices<Truncation> =
    std::to_array<Named<Truncation>>({{"error", Truncation::kError},
                                      {"left", Truncation::kLeft},
                                      {"right", Truncation::kRight},
                                      {"middle", Truncation::kMiddle}});

// Keeps `most` of the values, of which there are more (verl's rl_dataset.py).
template <typename Values>
void truncate(Values& values, std::int64_t most, Truncation truncation) {
  const auto surplus = static_cast<std::int64_t>(values.size()) - most;
  const auto begin = truncation == Truncation::kLeft     ? 0
                     : truncation == Truncation::kMiddle ? most / 2
                                                         : most;
  values.erase(values.begin() + begin, values.begin() + begin + surplus);
}

}  // namespace ferry::trainer
