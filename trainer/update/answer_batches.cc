#include "trainer/update/answer_batches.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "models/tensor_parallel/mappings.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/router_replay.h"

namespace ferry::trainer {
namespace {

at::Tensor mask_of(const AnsweredPrompt& prompt) {
  return prompt.response_mask.defined() ? prompt.response_mask
                                        : at::ones({prompt.num_response_tokens()}, at::kLong);
}

}  // namespace

std::vector<at::Tensor> sequences_of(const std::vector<AnsweredPrompt>& prompts) {
  std::vector<at::Tensor> sequences;
  for (const auto& prompt : prompts) sequences.push_back(prompt.tokens);
  return sequences;
}

std::vector<at::Tensor> scored_of(const std::vector<AnsweredPrompt>& prompts) {
  std::vector<at::Tensor> scored;
  for (const auto& prompt : prompts) {
    scored.push_back(at::zeros({prompt.tokens.size(0)}, at::kBool));
    answer_of(prompt, scored.back()).fill_(true);
  }
  return scored;
}

std::vector<models::SamplingMask> sampling_masks_of(const std::vector<AnsweredPrompt>& prompts) {
  std::vector<models::SamplingMask> masks;
  for (const auto& prompt : prompts) {
    const auto& mask = prompt.sampling_mask;
    const auto rows = static_cast<std::int64_t>(mask.offsets.size()) - 1;
    require(mask.defined() == prompts.front().sampling_mask.defined() &&
                (!mask.defined() || rows == prompt.num_response_tokens()),
            ErrorKind::kUsage, "a sampling mask of {} tokens for an answer of {}", rows,
            prompt.num_response_tokens());
    if (!mask.defined()) continue;
    models::SamplingMask places{.token_ids = mask.token_ids};
    places.offsets.assign(static_cast<std::size_t>(prompt.num_prompt_tokens - 1), 0);
    places.offsets.insert(places.offsets.end(), mask.offsets.begin(), mask.offsets.end());
    places.offsets.push_back(mask.offsets.back());
    masks.push_back(std::move(places));
  }
  return masks;
}

at::Tensor answer_of(const AnsweredPrompt& prompt, const at::Tensor& of_tokens) {
  return of_tokens.narrow(0, prompt.num_prompt_tokens - 1, prompt.num_response_tokens());
}

AnswerBatches::AnswerBatches(std::vector<AnsweredPrompt> prompts,
                             std::vector<Partition> parts,
                             const models::ParallelState& mesh)
    : prompts_(std::move(prompts)), parts_(std::move(parts)), mesh_(mesh) {
  std::int64_t tokens = 0;
  for (const auto& prompt : prompts_) {
    require(prompt.num_prompt_tokens > 0 && prompt.num_response_tokens() > 0, ErrorKind::kUsage,
            "a sample of {} tokens, {} of the prompt: it takes one of each at least",
            prompt.tokens.size(0), prompt.num_prompt_tokens);
    tokens += mask_of(prompt).sum().item<std::int64_t>();
  }
  const auto mine = at::tensor({tokens, static_cast<std::int64_t>(prompts_.size())}, at::kLong);
  const auto counts = mesh.dp().all_reduce(mine.to(mesh.world().device())).cpu();
  batch_num_tokens_ = counts[0].item<std::int64_t>();
  global_batch_size_ = counts[1].item<std::int64_t>();
  batches_ = pack_micro_batches(sequences_of(prompts_), parts_, mesh, scored_of(prompts_),
                                sampling_masks_of(prompts_));
}

at::Tensor AnswerBatches::pad(const std::vector<at::Tensor>& rows) const {
  if (!rows.front().defined()) return {};
  const auto longest =
      std::ranges::max(rows, {}, [](const auto& row) { return row.size(0); }).size(0);
  std::vector<at::Tensor> padded;
  for (const auto& row : rows)
    padded.push_back(at::constant_pad_nd(row, {0, longest - row.size(0)}));
  return at::stack(padded).to(mesh_.world().device());  // a copy waits for the device: one does
}

at::Tensor AnswerBatches::rows(std::size_t i, const at::Tensor& local) const {
  const auto tokens = batches_[i].in_pack_order(
      models::gather_from_sequence_parallel_region(local, mesh_.cp(), /*replicated=*/true));
  std::vector<at::Tensor> rows;
  std::int64_t begin = 0;
  for (const auto index : parts_[i]) {
    const auto& prompt = prompts_[index];
    rows.push_back(answer_of(prompt, tokens.narrow(0, begin, prompt.tokens.size(0))));
    begin += prompt.tokens.size(0);
  }
  return pad(rows);
}

at::Tensor AnswerBatches::response_mask(std::size_t i) const {
  std::vector<at::Tensor> rows;
  for (const auto index : parts_[i]) rows.push_back(mask_of(prompts_[index]));
  return pad(rows);
}

std::map<std::string, double> AnswerBatches::run(
    const Pipeline& pipeline,
    const LossFunction& loss,
    double grad_scale,
    const std::vector<at::Tensor>& routed_experts) const {
  ForwardBackwardOptions options{.grad_scale = grad_scale};
  if (!routed_experts.empty())
    options.routes = replay_routes(pipeline, batches_, parts_, routed_experts);
  const auto of_batches = forward_backward(pipeline, batches_, loss, options);
  // The last stage knows them; all data parallel ranks have their shares.
  const auto last = mesh_.pp().size() - 1;
  std::string names;
  std::vector<double> sums;
  if (mesh_.is_last_stage()) {
    std::map<std::string, double> total;
    for (const auto& metrics : of_batches) {
      for (const auto& [name, value] : metrics) total[name] += value.item<double>();
    }
    for (const auto& [name, value] : total) {
      names += name + "\n";
      sums.push_back(value);
    }
  }
  names = mesh_.pp().all_gather_bytes(names)[static_cast<std::size_t>(last)];
  const auto count = std::ranges::count(names, '\n');
  sums.resize(static_cast<std::size_t>(count));
  const auto mine = at::tensor(sums, at::kDouble).to(mesh_.world().device());
  const auto all = mesh_.dp().all_reduce(mesh_.pp().broadcast(mine, last)).cpu();
  std::map<std::string, double> metrics;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto end = names.find('\n');
    metrics[names.substr(0, end)] = all[i].item<double>();
    names.erase(0, end + 1);
  }
  return metrics;
}

}  // namespace ferry::trainer
