// The memory that a step needs beside the weights and the cache, measured before the cache is
// allocated (vLLM: GPUModelRunner.profile_run).
#pragma once

#include <cstdint>

#include "models/gpt_model.h"
#include "rollout/model_runner.h"

namespace ferry::rollout {

// Runs a step in which as many sequences as possible begin, with all tokens that a step may have
// and every kind of draw, a step at the end of the longest sequence, whose earlier keys are cached,
// and one of prompts with as many cached keys as attention gathers at a time. Called by all ranks
// of the model's mesh; the weights may hold any values.
void take_largest_steps(const models::GPTModel& model, const RunnerLimits& limits);

// Peak bytes of the device during take_largest_steps(); 0 on the host, where nothing runs. Throws
// Error(kDevice) if there is no memory for them.
std::int64_t step_memory(const models::GPTModel& model, const RunnerLimits& limits);

// Further bytes for each block of the cache: if no kernel reads the model's keys and values in
// place, those of a layer are gathered, concatenated and attended to, three times a layer's share
// of a block. Sequences that share blocks have them gathered for each, but no more blocks at a time
// than the cache has.
std::int64_t gathered_bytes_per_block(const models::GPTModel& model);

}  // namespace ferry::rollout
