#include "trainer/update/ppo_options.h"

#include "trainer/run/training_run.h"

namespace ferry::trainer {

PromptEncoderOptions encoder_options(const PpoDataConfig& data) {
  return {.max_prompt_length = data.max_prompt_length,
          .filter_overlong_prompts = data.filter_overlong_prompts,
          .truncation = data.truncation};
}

KlControl kl_control(const KlCtrlConfig& config) {
  return {.adaptive = config.type == KlCtrlType::kAdaptive,
          .kl_coef = config.kl_coef,
          .target_kl = config.target_kl,
          .horizon = config.horizon};
}

RolloutCorrectionConfig rollout_correction(const RolloutCorrectionSection& config) {
  return {.rollout_is = config.rollout_is,
          .rollout_is_threshold = config.rollout_is_threshold,
          .rollout_is_batch_normalize = config.rollout_is_batch_normalize,
          .rollout_rs = config.rollout_rs,
          .rollout_rs_threshold = config.rollout_rs_threshold};
}

}  // namespace ferry::trainer
