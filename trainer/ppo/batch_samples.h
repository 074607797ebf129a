// The responses of a batch, one by one: as they are kept for people, and as validation counts them.
#pragma once

#include <vector>

#include "trainer/dataset/prompt_examples.h"
#include "trainer/metrics/sample_log.h"
#include "trainer/metrics/val_metrics.h"
#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

// Both read scores and reward_extra_info of a batch that is answered and rewarded. Samples of
// several turns have `turns`, if the batch has their response_mask.
std::vector<LoggedSample> logged_samples(const RolloutBatch& batch, const PromptEncoder& encoder);
std::vector<ValidationSample> validation_samples(const RolloutBatch& batch);

}  // namespace ferry::trainer
