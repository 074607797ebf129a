#include "trainer/compute_log_prob.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "distckpt/error.h"
#include "models/tensor_parallel/mappings.h"
#include "models/world.h"
#include "trainer/micro_batches.h"

namespace ferry::trainer {

std::vector<SequenceLogProbs> compute_log_prob(const Pipeline& pipeline,
                                               const std::vector<at::Tensor>& sequences,
                                               const std::vector<Partition>& parts,
                                               double temperature) {
  const auto& mesh = pipeline.chunks.front()->mesh();
  const auto batches = pack_micro_batches(sequences, parts, mesh);
  std::int64_t num_tokens = 0;
  for (const auto& batch : batches) num_tokens += batch.num_tokens();
  std::vector<at::Tensor> of_batches(batches.size());  // [2, tokens of the pack], on the last stage
  const LossFunction keep = [&](const models::GPTModel& model, const at::Tensor& hidden,
                                std::size_t i) {
    const auto& batch = batches[i];
    const auto result = model.log_probs(hidden, batch.tokens_behind(1), temperature);
    const auto whole = [&](const at::Tensor& local) {
      const auto all = models::gather_from_sequence_parallel_region(local, mesh.cp());
      return batch.in_pack_order(all).narrow(0, 0, batch.num_tokens());
    };
    of_batches[i] = at::stack(std::vector{whole(result.log_probs), whole(result.entropy)});
    return LossOutput{};
  };
  forward_backward(pipeline, batches, keep, {.forward_only = true});

  const bool is_last = mesh.coordinates().pp == mesh.pp().size() - 1;
  const auto options = at::TensorOptions().dtype(at::kFloat).device(mesh.world().device());
  const auto mine = is_last ? at::cat(of_batches, 1) : at::zeros({2, num_tokens}, options);
  const auto all = mesh.pp().broadcast(mine, mesh.pp().size() - 1).cpu();

  std::vector<SequenceLogProbs> results(sequences.size());
  std::int64_t begin = 0;
  for (const auto& part : parts) {
    for (const auto i : part) {
      const auto tokens = sequences[i].size(0);
      require(tokens > 0 && !results[i].log_probs.defined(), ErrorKind::kBug,
              "sequence {} is empty, or in two micro-batches", i);
      results[i] = {.log_probs = all[0].narrow(0, begin, tokens - 1),
                    .entropys = all[1].narrow(0, begin, tokens - 1)};
      begin += tokens;
    }
  }
  require(begin == num_tokens, ErrorKind::kBug, "{} tokens in micro-batches of {}", begin,
          num_tokens);
  return results;
}

}  // namespace ferry::trainer
