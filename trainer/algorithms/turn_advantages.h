// Advantages of turns, for answers in which tools or an environment speak between turns of the
// model. A turn is a run of tokens of the model in `turn_mask`; its reward is that of its tokens
// and of those behind it up to the next turn. Formulas name their papers (config/ppo_choices.h).
#pragma once

#include "trainer/algorithms/advantages.h"

namespace ferry::trainer {

// [sequences, response], where the response mask is 1. Throws Error(kUsage) for an input that is
// missing.
at::Tensor gigpo_advantage(const AdvantageInputs& inputs, const AlgorithmConfig& config);
at::Tensor grpo_turns_advantage(const AdvantageInputs& inputs, const AlgorithmConfig& config);

}  // namespace ferry::trainer
