// What a step needs beside the weights and the cache, found out before the cache takes what is left
// (vLLM: GPUModelRunner.profile_run).
#pragma once

#include <cstdint>

#include "models/gpt_model.h"
#include "rollout/model_runner.h"

namespace ferry::rollout {

// Takes a step in which as many sequences as may be begin, with all the tokens that a step may have
// and every kind of draw, and one that reads the end of the longest sequence, behind keys that were
// cached. Called by all ranks of the model's mesh; weights may be anything.
void take_largest_steps(const models::GPTModel& model, const RunnerLimits& limits);

// Bytes of the device that these take at most, measured; 0 on the host, where nothing is done.
// Throws Error(kDevice) if there is no room even for them.
std::int64_t step_memory(const models::GPTModel& model, const RunnerLimits& limits);

// Bytes for each block of the cache, besides: where no kernel reads keys and values of the model's
// heads in their place, a layer's are gathered, put together and attended to, three times its share
// of a block. (Sequences of unlike lengths, or that share blocks, may take more: what
// gpu_memory_utilization leaves is for them.)
std::int64_t gathered_bytes_per_block(const models::GPTModel& model);

}  // namespace ferry::rollout
