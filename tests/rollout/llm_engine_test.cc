// The engine against repeated full forwards of the trainer's kind: the same tokens, and
// log-probabilities of the same bytes.
#include "rollout/llm_engine.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>

#include "distckpt/error.h"
#include "models/world.h"
#include "tests/support/tiny_training.h"

namespace ferry::rollout {
namespace {

using distckpt::DType;
using models::Alignment;
using models::GPTModel;

struct Sample {
  std::vector<std::int64_t> prompt{};
  std::vector<std::int64_t> output{};
  std::vector<float> logprobs{};
  FinishReason finish_reason = FinishReason::kNone;
};

// What a batch of requests, all there from the beginning, comes to.
std::map<std::string, Sample> run_all(LLMEngine& engine, std::map<std::string, Sample> samples) {
  while (engine.has_unfinished()) {
    for (const auto& request : engine.step()) {
      EXPECT_FALSE(request.error);
      for (const auto& part : request.outputs) {
        auto& sample = samples.at(request.request_id);
        for (const auto& token : part.tokens) {
          sample.output.push_back(token.token_id);
          sample.logprobs.push_back(token.logprob);
        }
        sample.finish_reason = part.finish_reason;
      }
    }
  }
  return samples;
}

std::vector<std::int64_t> random_prompt(std::int64_t length,
                                        std::int64_t vocab,
                                        std::uint64_t seed) {
  const auto tokens = support::random_sequences({length}, vocab, seed)[0];
  const auto* const begin = tokens.const_data_ptr<std::int64_t>();
  return {begin, begin + length};
}

// Of a sequence alone, as the trainer computes them: log-probabilities of its tokens from the
// second on, and the likeliest token at each place.
struct Forward {
  std::vector<float> log_probs{};
  std::vector<std::int64_t> best{};
};
Forward forward_alone(const GPTModel& model, const std::vector<std::int64_t>& tokens) {
  const at::NoGradGuard no_grad;
  const models::SequencePartition batch(models::pack({at::tensor(tokens, at::kLong)}),
                                        model.mesh());
  const auto hidden = model.forward(batch);
  const auto labels = batch.tokens_behind(1);
  const auto log_probs = model.log_probs(hidden, labels).log_probs;
  const auto best = model.all_logits(hidden, batch).argmax(-1);
  Forward result;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    result.log_probs.push_back(log_probs[static_cast<std::int64_t>(i)].item<float>());
    result.best.push_back(best[static_cast<std::int64_t>(i)].item<std::int64_t>());
  }
  return result;
}

void expect_is_the_forward(const GPTModel& model, const Sample& sample) {
  auto tokens = sample.prompt;
  tokens.insert(tokens.end(), sample.output.begin(), sample.output.end());
  const auto whole = forward_alone(model, tokens);
  ASSERT_EQ(sample.logprobs.size(), sample.output.size());
  for (std::size_t i = 0; i < sample.output.size(); ++i) {
    const auto at = sample.prompt.size() + i - 1;
    EXPECT_EQ(sample.output[i], whole.best[at]) << "token " << i;
    EXPECT_EQ(std::memcmp(&sample.logprobs[i], &whole.log_probs[at], sizeof(float)), 0)
        << "token " << i << ": " << sample.logprobs[i] << ", not " << whole.log_probs[at];
  }
}

struct Case {
  const char* family;
  DType dtype;
  std::optional<std::int64_t> window{};
};

class GreedyEngine : public testing::TestWithParam<Case> {
 protected:
  // Of tiny tensors a second thread takes longer to wake than to compute.
  static void SetUpTestSuite() { at::set_num_threads(1); }
};

TEST_P(GreedyEngine, EqualsRepeatedForwardsToTheByte) {
  auto config = support::tiny_config(
      {.family = GetParam().family, .head_dim = 16, .hidden = 64, .ffn = 96, .experts = 8});
  config.max_position_embeddings = 512;
  config.sliding_window = GetParam().window;
  const models::World world({});
  const models::ParallelState mesh(const_cast<models::World&>(world), {}, "test");
  GPTModel model(config, mesh, models::stage_chunks(config, {}, 0)[0],
                 {.alignment = Alignment::kBitwise, .dtype = GetParam().dtype});
  support::fill_parameters(model, 1);
  LLMEngine engine(model, {.max_num_seqs = 8, .max_num_batched_tokens = 48, .num_blocks = 6});
  std::map<std::string, Sample> samples;
  for (const std::int64_t length : {1, 5, 64, 100, 130}) {
    const auto id = std::to_string(length);
    samples[id].prompt =
        random_prompt(length, config.vocab_size, static_cast<std::uint64_t>(length));
    engine.add_request(id, samples[id].prompt, {.temperature = 0, .max_tokens = 40});
  }
  for (const auto& [id, sample] : run_all(engine, samples)) {
    SCOPED_TRACE(id);
    EXPECT_EQ(sample.output.size(), 40U);
    EXPECT_EQ(sample.finish_reason, FinishReason::kLength);
    expect_is_the_forward(model, sample);
  }
  EXPECT_GT(engine.stats().num_preemptions, 0);
  EXPECT_EQ(engine.stats().num_free_blocks, 6);
}

INSTANTIATE_TEST_SUITE_P(Models,
                         GreedyEngine,
                         testing::Values(Case{"llama", DType::kBF16},
                                         Case{"llama", DType::kF32},
                                         Case{"qwen2", DType::kBF16},
                                         Case{"qwen3", DType::kF32},
                                         Case{"llama", DType::kBF16, 70},
                                         Case{"qwen3_moe", DType::kBF16},
                                         Case{"deepseek_v3", DType::kBF16}),
                         [](const auto& one) {
                           return std::string(one.param.family) +
                                  (one.param.dtype == DType::kF32 ? "_fp32" : "_bf16") +
                                  (one.param.window ? "_windowed" : "");
                         });

}  // namespace
}  // namespace ferry::rollout
