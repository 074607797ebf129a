// What the updates of actor and critic have in common: the answers of a mini-batch as rows, cut out
// of the packs of tokens that micro-batches are; the counts that losses are divided by; metrics of
// the whole mini-batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "trainer/algorithms/agg_loss.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/engine/seqlen_balancing.h"

namespace ferry::trainer {

// A prompt and its answer, of R tokens.
struct AnsweredPrompt {
  at::Tensor tokens{};  // [prompt + R], int64, on the host
  std::int64_t num_prompt_tokens = 0;
  at::Tensor response_mask{};  // [R], int64: which of the answer's tokens count; undefined: all
  // Of each of them what it was drawn from, on the host; of all answers of a batch, or of none.
  models::SamplingMask sampling_mask{};

  std::int64_t num_response_tokens() const { return tokens.size(0) - num_prompt_tokens; }
};

std::vector<at::Tensor> sequences_of(const std::vector<AnsweredPrompt>& prompts);

// Where something is said of an answer's tokens: [prompt + R] of each, bool. Place t speaks of
// token t + 1.
std::vector<at::Tensor> scored_of(const std::vector<AnsweredPrompt>& prompts);

// The sampling mask of such places: of each place; none if the answers have none. Throws
// Error(kUsage) for one of another number of tokens.
std::vector<models::SamplingMask> sampling_masks_of(const std::vector<AnsweredPrompt>& prompts);

// [prompt + R, ...] of such places -> [R, ...] of the answer.
at::Tensor answer_of(const AnsweredPrompt& prompt, const at::Tensor& of_tokens);

template <typename Sample>
std::vector<AnsweredPrompt> answered_prompts(const std::vector<Sample>& samples) {
  std::vector<AnsweredPrompt> prompts;
  for (const auto& sample : samples) {
    prompts.push_back({sample.tokens, sample.num_prompt_tokens, sample.response_mask});
    if constexpr (requires { sample.sampling_mask; })
      prompts.back().sampling_mask = sample.sampling_mask;
  }
  return prompts;
}

class AnswerBatches {
 public:
  // Called by all ranks of the mesh, which outlives it, with the samples of their data parallel
  // rank and the parts of each micro-batch. Throws Error(kUsage) for one without prompt or answer.
  AnswerBatches(std::vector<AnsweredPrompt> prompts,
                std::vector<Partition> parts,
                const models::ParallelState& mesh);

  const models::SequencePartition& pack(std::size_t i) const { return batches_[i]; }
  // Sums over all ranks: tokens that count; answers, also those without such a token: an answer
  // that is rejected makes others weigh no more, where losses are means of sequences.
  std::int64_t batch_num_tokens() const { return batch_num_tokens_; }
  std::int64_t global_batch_size() const { return global_batch_size_; }

  // Rows of a micro-batch are [samples, longest answer], on the device, zeros behind the ends.
  //
  // Of what the last stage says of this rank's tokens, [local], differentiable: place t speaks of
  // token t + 1.
  at::Tensor rows(std::size_t i, const at::Tensor& local) const;
  // Of what each sample of the mini-batch has, [R]; undefined if the first has none.
  template <typename Sample>
  at::Tensor rows(std::size_t i,
                  const std::vector<Sample>& samples,
                  at::Tensor Sample::*of_sample) const {
    std::vector<at::Tensor> rows;
    for (const auto index : parts_[i]) rows.push_back(samples[index].*of_sample);
    return pad(rows);
  }
  at::Tensor response_mask(std::size_t i) const;  // int64

  // Forwards and backwards; the metrics of the whole mini-batch, on all ranks of the mesh.
  // `routed_experts` of each sample: where its tokens go (router_replay.h); none: as routers
  // choose.
  std::map<std::string, double> run(const Pipeline& pipeline,
                                    const LossFunction& loss,
                                    double grad_scale,
                                    const std::vector<at::Tensor>& routed_experts = {}) const;

 private:
  at::Tensor pad(const std::vector<at::Tensor>& rows) const;

  std::vector<AnsweredPrompt> prompts_;
  std::vector<Partition> parts_;
  const models::ParallelState& mesh_;
  std::vector<models::SequencePartition> batches_;
  std::int64_t batch_num_tokens_ = 0;
  std::int64_t global_batch_size_ = 0;
};

}  // namespace ferry::trainer
