// The configuration of reinforcement learning as the options of its parts.
#pragma once

#include "trainer/algorithms/kl_penalty.h"
#include "trainer/algorithms/rollout_corr.h"
#include "trainer/config/ppo_config.h"
#include "trainer/dataset/prompt_examples.h"

namespace ferry::trainer {

PromptEncoderOptions encoder_options(const PpoDataConfig& data);
KlControl kl_control(const KlCtrlConfig& config);
RolloutCorrectionConfig rollout_correction(const RolloutCorrectionSection& config);

}  // namespace ferry::trainer
