// The answers of a batch, one by one: as they are kept for people, and as validation counts them.
#pragma once

#include <vector>

#include "trainer/dataset/prompt_examples.h"
#include "trainer/metrics/sample_log.h"
#include "trainer/metrics/val_metrics.h"
#include "trainer/update/data_proto.h"

namespace ferry::trainer {

// Of a batch that is answered and rewarded: prompts, responses, attention_mask, token_level_scores;
// data_source, uid, ground_truth, reward_extra_info.
std::vector<LoggedSample> logged_samples(const DataProto& batch, const PromptEncoder& encoder);
std::vector<ValidationSample> validation_samples(const DataProto& batch);

}  // namespace ferry::trainer
