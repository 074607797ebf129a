#include "trainer/engine/pipeline/load_balancing.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"

namespace ferry::trainer {
namespace {

enum LossKind : std::int64_t { kAux, kSeqAux, kGlobalAux, kZ, kKinds };
constexpr std::array kLossNames{"moe/aux_loss", "moe/seq_aux_loss", "moe/global_aux_loss",
                                "moe/z_loss"};

// Hands the weights of the experts on as they are, and in the backward adds the gradient of the
// losses to that of the logits (Megatron-Core moe_utils.py, MoEAuxLossAutoScaler).
class AddLossGradient : public torch::autograd::Function<AddLossGradient> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& weights,
                            const at::Tensor& /*logits*/,
                            const at::Tensor& gradient) {
    context->save_for_backward({gradient});
    return weights.view_as(weights);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0], context->get_saved_variables()[0], at::Tensor()};
  }
};

// The number of rows in each of `bins`: indices and counts of [rows] or [rows, choices].
at::Tensor count(const at::Tensor& indices, const at::Tensor& is_token, std::int64_t bins) {
  const auto counted = is_token.unsqueeze(-1).expand_as(indices).reshape(-1);
  return at::zeros({bins}, is_token.options()).scatter_add_(0, indices.reshape(-1), counted);
}

// Scores and their gradient by the logits, as compute_routing_scores_for_aux_loss has them.
struct Scores {
  at::Tensor of_experts{};  // [rows, experts], fp32, of sum 1
  at::Tensor sigmoid{};     // before they were divided by `sum`; undefined: it is a softmax
  at::Tensor sum{};

  Scores(const at::Tensor& logits, models::ScoreFunction score_function) {
    if (score_function == models::ScoreFunction::kSoftmax) {
      of_experts = at::softmax(logits, -1, at::kFloat);
      return;
    }
    sigmoid = at::sigmoid(logits.to(at::kFloat));
    sum = sigmoid.sum(-1, /*keepdim=*/true) + 1e-20;
    of_experts = sigmoid / sum;
  }
  // `slopes` [rows or 1, experts]: the gradient by the scores.
  at::Tensor gradient(const at::Tensor& slopes) const {
    const auto centred = slopes - (of_experts * slopes).sum(-1, /*keepdim=*/true);
    return sigmoid.defined() ? centred / sum * sigmoid * (1 - sigmoid) : of_experts * centred;
  }
};

}  // namespace

at::Tensor get_updated_expert_bias(const at::Tensor& tokens_per_expert,
                                   const at::Tensor& expert_bias,
                                   double update_rate) {
  const auto loads = tokens_per_expert.to(at::kDouble);
  const auto offset = loads.mean(-1, /*keepdim=*/true) - loads;
  return expert_bias + offset.sign().to(expert_bias.scalar_type()) * update_rate;
}

LoadBalancing::LoadBalancing(const models::TransformerConfig& config,
                             const models::ParallelState& mesh,
                             const LoadBalancingConfig& balancing)
    : config_(config), mesh_(mesh), balancing_(balancing) {
  for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
    if (config.is_moe_layer(layer)) moe_layers_.push_back(layer);
  }
}

void LoadBalancing::begin(std::span<const models::SequencePartition> batches, double grad_scale) {
  const auto device = mesh_.world().device();
  grad_scale_ = grad_scale;
  batches_.clear();
  std::vector<std::int64_t> counts{0};  // sequences, then the tokens of each micro-batch
  for (const auto& batch : batches) {
    const auto& ends = batch.cu_seqlens();
    const auto sequences = static_cast<std::int64_t>(ends.size()) - 1;
    const auto all = batch.sequence_ids();
    const auto rows = all.size(0) / mesh_.tp().size();
    const auto mine = all.narrow(0, mesh_.tp().rank() * rows, rows);
    const auto lengths = at::diff(at::tensor(ends, at::kLong)).to(at::kFloat).to(device);
    batches_.push_back({.sequences = mine.clamp_max(sequences - 1),
                        .is_token = mine.lt(sequences).to(at::kLong),
                        .lengths = lengths,
                        .tokens = batch.num_tokens()});
    counts[0] += sequences;
    counts.push_back(batch.num_tokens());
  }
  const auto sums = mesh_.dp().all_reduce(at::tensor(counts, at::kLong).to(device)).cpu();
  const auto* const sum = sums.const_data_ptr<std::int64_t>();
  sequences_of_batch_ = sum[0];
  tokens_of_batch_ = 0;
  for (std::size_t i = 0; i < batches_.size(); ++i)
    tokens_of_batch_ += batches_[i].tokens_of_all = sum[i + 1];
  tokens_of_step_ += tokens_of_batch_;
  for (auto& [index, layer] : layers_) {
    layer.global_tokens_per_expert.zero_();
    layer.global_tokens = 0;
  }
}

models::RoutingHook LoadBalancing::hook(std::size_t micro_batch) {
  return [this, micro_batch](std::int64_t layer, const models::Routing& routing) {
    return balance(micro_batch, layer, routing);
  };
}

at::Tensor LoadBalancing::balance(std::size_t micro_batch,
                                  std::int64_t layer,
                                  const models::Routing& routing) {
  const auto& batch = batches_.at(micro_batch);
  require(routing.logits.size(0) == batch.is_token.size(0), ErrorKind::kBug,
          "a router of {} rows, the micro-batch has {}", routing.logits.size(0),
          batch.is_token.size(0));
  auto& sums = layers_[layer];
  if (!sums.losses.defined()) {
    sums.tokens_per_expert = at::zeros({config_.num_moe_experts}, batch.is_token.options());
    sums.global_tokens_per_expert = at::zeros_like(sums.tokens_per_expert);
    sums.losses = at::zeros({kKinds}, batch.is_token.options().dtype(at::kDouble));
  }
  at::Tensor slope;
  {
    const at::NoGradGuard no_grad;
    sums.tokens_per_expert += count(routing.experts, batch.is_token, config_.num_moe_experts);
    if (!balancing_.has_losses()) return routing.weights;
    slope = gradient(batch, sums, routing.logits.detach());
  }
  return AddLossGradient::apply(routing.weights, routing.logits, slope);
}

// Every loss of experts is the sum over tokens and experts of scores times constants, `slopes`:
// E / (topk T) f_i for the mean over the T tokens that it is of, f_i of which chose expert i
// (switch_load_balancing_loss_func).
at::Tensor LoadBalancing::gradient(const MicroBatch& batch,
                                   Layer& layer,
                                   const at::Tensor& logits) {
  const auto experts = config_.num_moe_experts;
  const auto topk = config_.moe_router_topk;
  const auto is_token = batch.is_token.unsqueeze(-1).to(at::kFloat);
  const auto tokens = static_cast<double>(tokens_of_batch_);
  const auto per_choice = static_cast<double>(experts) / static_cast<double>(topk);
  auto total = at::zeros(logits.sizes(), logits.options().dtype(at::kFloat));
  const auto& b = balancing_;
  if (b.aux_loss_coeff > 0 || b.seq_aux_loss_coeff > 0 || b.global_aux_loss_coeff > 0) {
    const Scores scores(logits, config_.moe_router_score_function);
    const auto chosen = std::get<1>(at::topk(scores.of_experts, topk, -1));
    const auto over_tp_cp = [&](const at::Tensor& mine) {
      return mesh_.cp().all_reduce(mesh_.tp().all_reduce(mine));
    };
    at::Tensor slopes;
    const auto add = [&](LossKind kind, double coeff, const at::Tensor& of_rows) {
      layer.losses[kind] += (scores.of_experts * of_rows * is_token).sum().to(at::kDouble);
      slopes = slopes.defined() ? slopes + coeff * of_rows : coeff * of_rows;
    };
    if (b.aux_loss_coeff > 0) {
      const auto counts = over_tp_cp(count(chosen, batch.is_token, experts));
      const auto scale = per_choice / (static_cast<double>(batch.tokens) * tokens);
      add(kAux, b.aux_loss_coeff, (counts.to(at::kFloat) * scale).unsqueeze(0));
    }
    if (b.seq_aux_loss_coeff > 0) {
      const auto sequences = batch.lengths.size(0);
      const auto bins = chosen + experts * batch.sequences.unsqueeze(-1);
      const auto counts = over_tp_cp(count(bins, batch.is_token, sequences * experts));
      const auto scale = per_choice / (batch.lengths.square() * sequences_of_batch_);
      const auto of_sequences =
          counts.view({sequences, experts}).to(at::kFloat) * scale.unsqueeze(-1);
      add(kSeqAux, b.seq_aux_loss_coeff, of_sequences.index_select(0, batch.sequences));
    }
    if (b.global_aux_loss_coeff > 0) {
      layer.global_tokens_per_expert +=
          mesh_.dp().all_reduce(over_tp_cp(count(chosen, batch.is_token, experts)));
      layer.global_tokens += batch.tokens_of_all;
      const auto scale = per_choice / (static_cast<double>(layer.global_tokens) * tokens);
      add(kGlobalAux, b.global_aux_loss_coeff,
          (layer.global_tokens_per_expert.to(at::kFloat) * scale).unsqueeze(0));
    }
    total += scores.gradient(slopes);
  }
  if (b.z_loss_coeff > 0) {
    const auto wide = logits.to(at::kFloat);
    const auto log_sum = at::logsumexp(wide, {-1}, /*keepdim=*/true);
    layer.losses[kZ] += (log_sum.square() * is_token).sum().to(at::kDouble) / tokens;
    total += (2 * b.z_loss_coeff / tokens) * log_sum * at::softmax(wide, -1);
  }
  return (total * is_token * grad_scale_).to(logits.scalar_type());
}

std::map<std::string, double> LoadBalancing::finish(const std::vector<models::GPTModel*>& chunks,
                                                    bool updates) {
  const auto device = mesh_.world().device();
  const auto layers = static_cast<std::int64_t>(moe_layers_.size());
  const auto experts = config_.num_moe_experts;
  auto counts = at::zeros({layers, experts}, at::TensorOptions().dtype(at::kLong).device(device));
  auto losses = at::zeros({kKinds}, at::TensorOptions().dtype(at::kDouble).device(device));
  for (const auto& [index, layer] : layers_) {
    counts[std::ranges::find(moe_layers_, index) - moe_layers_.begin()] += layer.tokens_per_expert;
    losses += layer.losses;
  }
  layers_.clear();
  const auto tokens = std::exchange(tokens_of_step_, 0);
  if (tokens == 0) return {};
  counts = mesh_.all().all_reduce(counts);
  losses = mesh_.all().all_reduce(losses).cpu() / layers;
  if (updates && balancing_.bias_update_rate > 0) {
    for (auto* const chunk : chunks) {
      for (const auto layer : chunk->stage().layers) {
        const auto bias = chunk->parameters().value_if(
            fmt::format("decoder.layers.{}.mlp.router.expert_bias", layer));
        if (!bias.defined()) continue;
        const auto place = std::ranges::find(moe_layers_, layer) - moe_layers_.begin();
        bias.copy_(get_updated_expert_bias(counts[place], bias, balancing_.bias_update_rate));
      }
    }
  }
  const auto loads = counts.to(at::kDouble).cpu();
  const auto equal =
      static_cast<double>(tokens * config_.moe_router_topk) / static_cast<double>(experts);
  std::map<std::string, double> metrics{
      {"moe/load_max", loads.max().item<double>() / equal},
      {"moe/load_min", loads.min().item<double>() / equal},
      {"moe/dropped", static_cast<double>(tokens * config_.moe_router_topk * layers) -
                          loads.sum().item<double>()}};
  const std::array coeffs{balancing_.aux_loss_coeff, balancing_.seq_aux_loss_coeff,
                          balancing_.global_aux_loss_coeff, balancing_.z_loss_coeff};
  for (std::size_t kind = 0; kind < kLossNames.size(); ++kind) {
    if (coeffs[kind] > 0)
      metrics[kLossNames[kind]] = losses[static_cast<std::int64_t>(kind)].item<double>();
  }
  return metrics;
}

}  // namespace ferry::trainer
