#include "tests/support/models/engine_load.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <map>
#include <random>

#include "tests/support/models/tiny_training.h"

namespace ferry::support {

using rollout::SamplingParams;

std::vector<std::int64_t> Sample::tokens() const {
  auto all = prompt;
  all.insert(all.end(), output.begin(), output.end());
  return all;
}

std::vector<std::int64_t> random_prompt(std::int64_t length,
                                        std::int64_t vocab,
                                        std::uint64_t seed) {
  const auto tokens = random_sequences({length}, vocab, seed)[0];
  const auto* const begin = tokens.const_data_ptr<std::int64_t>();
  return {begin, begin + length};
}

namespace {

class Loader {
 public:
  Loader(rollout::LLMEngine& engine, std::int64_t vocab, const Load& load)
      : engine_(engine), vocab_(vocab), load_(load), random_(load.seed) {}

  std::vector<Sample> run() {
    for (;;) {
      // A rank that has something to do keeps those together that share its experts.
      const auto count = std::max<std::int64_t>(up_to(load_.arrivals), under_way_ == 0 ? 1 : 0);
      for (auto i = count; i > 0 && expected_ < load_.tokens; --i) add();
      if (!engine_.has_unfinished()) break;
      for (const auto& output : engine_.step()) take(output);
    }
    std::vector<Sample> samples;
    for (auto& [id, sample] : samples_) samples.push_back(std::move(sample));
    return samples;
  }

 private:
  std::int64_t up_to(std::int64_t most) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(most + 1));
  }

  void add() {
    std::vector<std::int64_t> prompt;
    if (static_cast<double>(up_to(1000)) < 1000 * load_.system_prompts) {
      const auto which = up_to(2);
      prompt = random_prompt(load_.longest_prompt * (which + 1) / 4, vocab_,
                             static_cast<std::uint64_t>(which));
    }
    const auto more = random_prompt(
        1 + up_to(load_.longest_prompt - static_cast<std::int64_t>(prompt.size()) - 1), vocab_,
        random_());
    prompt.insert(prompt.end(), more.begin(), more.end());
    SamplingParams params{.ignore_eos = true, .max_tokens = 1 + up_to(load_.longest_output - 1)};
    switch (up_to(3)) {
      case 0:
        params.temperature = 0;
        break;
      case 1:
        params.n = 1 + up_to(3);
        break;
      case 2:
        params.top_k = 5;
        params.temperature = 0.7;
        break;
      default:
        params.top_p = 0.8;
        params.repetition_penalty = 1.2;
        params.n = 2;
        break;
    }
    const auto id = std::to_string(num_requests_++);
    for (std::int64_t i = 0; i < params.n; ++i)
      samples_[{id, i}] = {.request_id = id, .prompt = prompt};
    expected_ += params.n * params.max_tokens;
    ++under_way_;
    engine_.add_request(id, prompt, params);
  }

  void take(const rollout::RequestOutput& output) {
    under_way_ -= output.finished ? 1 : 0;
    if (output.error) ADD_FAILURE() << output.request_id << ": " << output.error->what();
    for (const auto& part : output.outputs) {
      auto& sample = samples_.at({output.request_id, part.index});
      for (const auto& token : part.tokens) {
        sample.output.push_back(token.token_id);
        sample.logprobs.push_back(token.logprob);
        sample.processed_logprobs.push_back(token.processed_logprob);
      }
      std::ranges::copy(part.routed_experts, std::back_inserter(sample.routed_experts));
      sample.finish_reason = part.finish_reason;
    }
  }

  rollout::LLMEngine& engine_;
  std::int64_t vocab_;
  Load load_;
  std::mt19937_64 random_;
  std::map<std::pair<std::string, std::int64_t>, Sample> samples_;
  std::int64_t num_requests_ = 0;
  std::int64_t expected_ = 0;   // tokens
  std::int64_t under_way_ = 0;  // requests
};

}  // namespace

std::vector<Sample> run_load(rollout::LLMEngine& engine, std::int64_t vocab, const Load& load) {
  return Loader(engine, vocab, load).run();
}

namespace {

// Shows each drawn token's log-probability, and the trainer's.
template <typename Compare>
void compare(const models::GPTModel& trainer,
             const std::vector<Sample>& samples,
             std::size_t packed,
             const Compare& compare_one) {
  const at::NoGradGuard no_grad;
  for (std::size_t first = 0; first < samples.size(); first += packed) {
    const auto some = std::span(samples).subspan(first, std::min(packed, samples.size() - first));
    std::vector<at::Tensor> sequences;
    for (const auto& sample : some) sequences.push_back(at::tensor(sample.tokens(), at::kLong));
    const auto pack = models::pack(sequences);
    const models::SequencePartition batch(pack, trainer.mesh());
    const auto log_probs =
        trainer.log_probs(trainer.forward(batch), batch.tokens_behind(1)).log_probs.cpu();
    const auto* const theirs = log_probs.const_data_ptr<float>();
    for (std::size_t i = 0; i < some.size(); ++i) {
      const auto& sample = some[i];
      // The row of a token is the one before it.
      const auto* const row =
          theirs + pack.cu_seqlens[i] + static_cast<std::int64_t>(sample.prompt.size()) - 1;
      for (std::size_t j = 0; j < sample.logprobs.size(); ++j)
        compare_one(sample.logprobs[j], row[j]);
    }
  }
}

}  // namespace

std::int64_t count_unequal(const models::GPTModel& trainer,
                           const std::vector<Sample>& samples,
                           std::size_t packed) {
  std::int64_t unequal = 0;
  compare(trainer, samples, packed, [&](float ours, float theirs) {
    unequal += std::bit_cast<std::uint32_t>(ours) != std::bit_cast<std::uint32_t>(theirs) ? 1 : 0;
  });
  return unequal;
}

std::int64_t count_other_routes(const models::GPTModel& trainer,
                                const std::vector<Sample>& samples) {
  const at::NoGradGuard no_grad;
  std::int64_t others = 0;
  for (const auto& sample : samples) {
    const models::SequencePartition batch(models::pack({at::tensor(sample.tokens(), at::kLong)}),
                                          trainer.mesh());
    std::vector<at::Tensor> of_layers;
    const auto record = [&](std::int64_t, const at::Tensor& experts) {
      of_layers.push_back(experts);
    };
    (void)trainer.forward(batch, {}, {}, {.record = record});
    const auto theirs = at::stack(of_layers, 1).cpu();  // [tokens, layers with experts, topk]
    const auto ours = rollout::routed_experts_tensor(sample.routed_experts, trainer.config());
    const auto tokens = theirs.size(0) - 1;
    others += std::abs(tokens - ours.size(0));
    const auto both = std::min(tokens, ours.size(0));
    others += (ours.narrow(0, 0, both) != theirs.narrow(0, 0, both))
                  .flatten(1)
                  .any(1)
                  .sum()
                  .item<std::int64_t>();
  }
  return others;
}

float largest_difference(const models::GPTModel& trainer, const std::vector<Sample>& samples) {
  float largest = 0;
  compare(trainer, samples, 1,
          [&](float ours, float theirs) { largest = std::max(largest, std::abs(ours - theirs)); });
  return largest;
}

}  // namespace ferry::support
