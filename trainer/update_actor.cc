#include "trainer/update_actor.h"

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "distckpt/error.h"
#include "models/tensor_parallel/mappings.h"
#include "models/world.h"
#include "trainer/micro_batches.h"

namespace ferry::trainer {
namespace {

// Rows of unlike lengths, zeros behind: [rows, longest]. Undefined if the first is.
at::Tensor pad_rows(const std::vector<at::Tensor>& rows, std::int64_t longest, at::Device device) {
  if (!rows.front().defined()) return {};
  std::vector<at::Tensor> padded;
  for (const auto& row : rows)
    padded.push_back(at::constant_pad_nd(row.to(device), {0, longest - row.size(0)}));
  return at::stack(padded);
}

// Of one micro-batch, from its packed rows of log-probabilities and entropies.
class Losses {
 public:
  Losses(const std::vector<ActorSample>& samples,
         const std::vector<Partition>& parts,
         const std::vector<models::SequencePartition>& batches,
         const ActorUpdate& update,
         GlobalBatchInfo info)
      : samples_(samples), parts_(parts), batches_(batches), update_(update), info_(info) {}

  LossOutput operator()(const models::GPTModel& model,
                        const at::Tensor& hidden,
                        std::size_t i) const {
    const auto& batch = batches_[i];
    const auto result = model.log_probs(hidden, batch.tokens_behind(1), update_.temperature);
    const auto rows_of = [&](const at::Tensor& local) {
      const auto all = models::gather_from_sequence_parallel_region(local, model.mesh().cp(),
                                                                    /*replicated=*/true);
      return answers(batch.in_pack_order(all), i);
    };
    ActorLossInputs inputs;
    inputs.policy.log_prob = rows_of(result.log_probs);
    const auto longest = inputs.policy.log_prob.size(1);
    const auto device = hidden.device();
    const auto given = [&](at::Tensor ActorSample::*one) {
      std::vector<at::Tensor> rows;
      for (const auto sample : parts_[i]) rows.push_back(samples_[sample].*one);
      return pad_rows(rows, longest, device);
    };
    inputs.policy.old_log_prob = given(&ActorSample::old_log_prob);
    inputs.policy.advantages = given(&ActorSample::advantages);
    inputs.policy.rollout_is_weights = given(&ActorSample::rollout_is_weights);
    inputs.policy.cov_tokens = given(&ActorSample::cov_tokens);
    inputs.policy.response_mask = mask(i, longest, device);
    inputs.ref_log_prob = given(&ActorSample::ref_log_prob);
    if (update_.loss.entropy_coeff != 0) inputs.entropy = rows_of(result.entropy);
    return ppo_loss(inputs, update_.loss, info_);
  }

 private:
  // Packed tokens -> those of the answers [samples, longest answer]: place t speaks of token t + 1.
  at::Tensor answers(const at::Tensor& packed, std::size_t i) const {
    std::vector<at::Tensor> rows;
    std::int64_t longest = 0;
    std::int64_t begin = 0;
    for (const auto index : parts_[i]) {
      const auto& sample = samples_[index];
      rows.push_back(
          packed.narrow(0, begin + sample.num_prompt_tokens - 1, sample.num_response_tokens()));
      longest = std::max(longest, sample.num_response_tokens());
      begin += sample.tokens.size(0);
    }
    return pad_rows(rows, longest, packed.device());
  }

  at::Tensor mask(std::size_t i, std::int64_t longest, at::Device device) const {
    auto mask = at::zeros({static_cast<std::int64_t>(parts_[i].size()), longest}, at::kLong);
    for (std::size_t row = 0; row < parts_[i].size(); ++row)
      mask[static_cast<std::int64_t>(row)]
          .narrow(0, 0, samples_[parts_[i][row]].num_response_tokens())
          .fill_(1);
    return mask.to(device);
  }

  const std::vector<ActorSample>& samples_;
  const std::vector<Partition>& parts_;
  const std::vector<models::SequencePartition>& batches_;
  const ActorUpdate& update_;
  GlobalBatchInfo info_;
};

}  // namespace

std::map<std::string, double> update_actor(const Pipeline& pipeline,
                                           const std::vector<ActorSample>& samples,
                                           const std::vector<Partition>& parts,
                                           const ActorUpdate& update,
                                           double grad_scale) {
  const auto& mesh = pipeline.chunks.front()->mesh();
  std::vector<at::Tensor> sequences;
  std::int64_t tokens = 0;
  for (const auto& sample : samples) {
    require(sample.num_prompt_tokens > 0 && sample.num_response_tokens() > 0, ErrorKind::kUsage,
            "a sample of {} tokens, {} of the prompt: it takes one of each at least",
            sample.tokens.size(0), sample.num_prompt_tokens);
    sequences.push_back(sample.tokens);
    tokens += sample.num_response_tokens();
  }
  const auto device = mesh.world().device();
  const auto counts = mesh.dp().all_reduce(
      at::tensor({tokens, static_cast<std::int64_t>(samples.size())}, at::kLong).to(device));
  const GlobalBatchInfo info{.batch_num_tokens = counts[0].item<std::int64_t>(),
                             .global_batch_size = counts[1].item<std::int64_t>(),
                             .loss_scale_factor = update.loss_scale_factor};
  const auto batches = pack_micro_batches(sequences, parts, mesh);
  const Losses losses(samples, parts, batches, update, info);
  const auto of_batches = forward_backward(pipeline, batches, losses, {.grad_scale = grad_scale});

  // The last stage knows them; all data parallel ranks have their shares.
  const auto last = mesh.pp().size() - 1;
  std::string names;
  std::vector<double> sums;
  if (mesh.pp().rank() == last) {
    std::map<std::string, double> total;
    for (const auto& metrics : of_batches) {
      for (const auto& [name, value] : metrics) total[name] += value.item<double>();
    }
    for (const auto& [name, value] : total) {
      names += name + "\n";
      sums.push_back(value);
    }
  }
  names = mesh.pp().all_gather_bytes(names)[static_cast<std::size_t>(last)];
  const auto count = std::ranges::count(names, '\n');
  sums.resize(static_cast<std::size_t>(count));
  const auto mine = at::tensor(sums, at::kDouble).to(device);
  const auto all = mesh.dp().all_reduce(mesh.pp().broadcast(mine, last)).cpu();
  std::map<std::string, double> metrics;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto end = names.find('\n');
    metrics[names.substr(0, end)] = all[i].item<double>();
    names.erase(0, end + 1);
  }
  return metrics;
}

}  // namespace ferry::trainer
