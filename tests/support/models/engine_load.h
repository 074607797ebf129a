// Random loads for the engine, and what the trainer's forward says of the sequences that came of
// them: tests of equality to the byte share these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "models/gpt_model.h"
#include "rollout/llm_engine.h"

namespace ferry::support {

// A finished sample.
struct Sample {
  std::string request_id{};
  std::vector<std::int64_t> prompt{};
  std::vector<std::int64_t> output{};
  std::vector<float> logprobs{};  // of the model, as the engine reports them
  std::vector<float> processed_logprobs{};
  std::vector<std::byte> routed_experts{};  // of an engine that returns them
  rollout::FinishReason finish_reason = rollout::FinishReason::kNone;

  std::vector<std::int64_t> tokens() const;
};

std::vector<std::int64_t> random_prompt(std::int64_t length,
                                        std::int64_t vocab,
                                        std::uint64_t seed);

struct Load {
  std::int64_t tokens = 1000;  // drawn at least
  std::int64_t longest_prompt = 150;
  std::int64_t longest_output = 60;
  std::int64_t arrivals = 3;    // requests in a step, at most
  double system_prompts = 0.5;  // share of the prompts that begin like others
  std::uint64_t seed = 1;
};

// Requests come at random times, with random prompts, lengths, numbers of samples and parameters;
// all follow from the seed. Returns what they come to. Fails the test if one is refused.
std::vector<Sample> run_load(rollout::LLMEngine& engine, std::int64_t vocab, const Load& load);

// Tokens whose log-probability has other bytes in the forward of the finished sequence: each alone,
// or `packed` with as many others.
std::int64_t count_unequal(const models::GPTModel& trainer,
                           const std::vector<Sample>& samples,
                           std::size_t packed);
// Tokens, of all but the last of each sample, that go to other experts, or are told of in another
// number, than the router sends them to in that forward.
std::int64_t count_other_routes(const models::GPTModel& trainer,
                                const std::vector<Sample>& samples);
// The largest distance between the two log-probabilities, each alone.
float largest_difference(const models::GPTModel& trainer, const std::vector<Sample>& samples);

}  // namespace ferry::support
