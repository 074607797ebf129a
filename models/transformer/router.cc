#include "models/transformer/router.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <tuple>

#include "distckpt/base/error.h"
#include "models/kernels/experts/experts.h"
#include "models/kernels/experts/sigmoid_choice.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/whole_vectors.h"

namespace ferry::models {

TopKRouter::TopKRouter(const ModelSetup& setup, Parameters& parameters, const std::string& prefix)
    : setup_(setup),
      // Every rank routes its own tokens.
      weight_(parameters.take(prefix + "mlp.router.weight", GradientOverTp::kPartial)),
      bias_(parameters.take_if(prefix + "mlp.router.bias", GradientOverTp::kPartial)),
      expert_bias_(parameters.take_if(prefix + "mlp.router.expert_bias")) {}

bool TopKRouter::chooses_in_one_kernel(const at::Tensor& x) const {
  const auto experts = weight_.size(0);
  const auto topk = setup_.config.moe_router_topk;
  return x.is_cuda() && !setup_.config.traits.moe_router_weights_in_fp32 &&
         models::chooses_in_one_kernel(experts, topk) &&
         (setup_.alignment() == Alignment::kFast || chooses_as_aten(experts, topk, x.device()));
}

Routing TopKRouter::generate(const at::Tensor& x, const RouterChoice& choice) const {
  auto routing = route(x, choice.given, /*generates=*/true);
  if (choice.record) choice.record(routing.experts);
  return routing;
}

Routing TopKRouter::forward(const at::Tensor& x, const RouterChoice& choice) const {
  auto routing = route(x, choice.given, /*generates=*/false);
  if (choice.record) choice.record(routing.experts);
  // A pass that is computed again has no gradients the first time.
  if (choice.balance && at::GradMode::is_enabled()) routing.weights = choice.balance(routing);
  return routing;
}

Routing TopKRouter::route(const at::Tensor& x, const at::Tensor& given, bool generates) const {
  const auto& config = setup_.config;
  const auto topk = config.moe_router_topk;
  const bool replays = given.defined();
  require(!replays || (given.size(0) == x.size(0) && given.size(1) == topk), ErrorKind::kBug,
          "experts of {} tokens are given to a router of {}", replays ? given.size(0) : 0,
          x.size(0));
  const auto experts_for = [&](const at::Tensor& chosen) {
    return replays ? at::where(given < 0, chosen, given) : chosen;
  };
  const auto grouped = [&](const at::Tensor& scores) {
    return scores.view(
        {-1, config.moe_router_num_groups, config.num_moe_experts / config.moe_router_num_groups});
  };
  const bool groups = config.moe_router_num_groups > 1;
  Routing routing;
  if (!config.routes_in_fp32() && bias_.defined()) {  // GPT-OSS
    routing.logits = linear(x, weight_, bias_, setup_.alignment());
    const auto [best, chosen] = at::topk(routing.logits, topk, -1);
    routing.experts = experts_for(chosen);
    routing.weights = at::softmax(replays ? routing.logits.gather(1, routing.experts) : best, -1);
    return routing;
  }
  if (!config.routes_in_fp32()) {  // Mixtral, Qwen2-MoE, Qwen3-MoE
    const bool normalize = !config.moe_router_pre_softmax;
    const bool one_kernel = generates && !replays && chooses_in_one_kernel(x);
    if (one_kernel && few_routed_supported(x, weight_, topk, setup_.alignment())) {
      auto [experts, weights] = route_few(x, weight_, topk, normalize, setup_.alignment());
      return {.experts = experts, .weights = weights};
    }
    routing.logits = linear(x, weight_, {}, setup_.alignment());
    if (one_kernel) {
      auto [experts, weights] = choose_experts(routing.logits, topk, normalize, setup_.alignment());
      return {.experts = experts, .weights = weights, .logits = routing.logits};
    }
    const auto scores = at::softmax(routing.logits, -1, at::kFloat);
    const auto [best, chosen] = at::topk(scores, topk, -1);
    routing.experts = experts_for(chosen);
    routing.weights = replays ? scores.gather(1, routing.experts) : best;
    if (normalize) routing.weights = routing.weights / routing.weights.sum(-1, /*keepdim=*/true);
    if (!config.traits.moe_router_weights_in_fp32)
      routing.weights = routing.weights.to(x.scalar_type());
    return routing;
  }
  routing.logits = config.traits.moe_router_logits_in_params_dtype  // MiniMax-M2
                       ? linear(x, weight_, {}, setup_.alignment()).to(at::kFloat)
                       : linear_in_fp32(x, weight_, setup_.alignment());
  const bool softmax = config.moe_router_score_function == ScoreFunction::kSoftmax;
  if (softmax && expert_bias_.defined()) {  // ERNIE 4.5
    const auto scores = at::softmax(routing.logits, -1, at::kFloat);
    routing.experts = experts_for(std::get<1>(at::topk(scores + expert_bias_, topk, -1)));
    const auto chosen = scores.gather(1, routing.experts);
    const auto sum = chosen.sum(-1, /*keepdim=*/true).clamp_min(config.moe_router_norm_min);
    routing.weights = (chosen / sum).to(x.scalar_type());
    return routing;
  }
  if (softmax) {  // DeepSeek-V2
    const auto scores = at::softmax(routing.logits, -1, at::kFloat);
    const auto limited = groups ? limit_to_groups(scores, grouped(scores).amax(-1),
                                                  config.moe_router_group_topk, 0.0)
                                : scores;
    const auto [best, chosen] = at::topk(limited, topk, -1, /*largest=*/true, /*sorted=*/false);
    routing.experts = experts_for(chosen);
    routing.weights = (replays ? scores.gather(1, routing.experts) : best) *
                      config.moe_router_topk_scaling_factor;
    return routing;
  }
  // The choice of DeepSeek-V3 and of the families after it.
  const SigmoidChoice of_sigmoids{
      .topk = topk,
      .groups = std::max<std::int64_t>(config.moe_router_num_groups, 1),
      .group_topk = std::max<std::int64_t>(config.moe_router_group_topk, 1),
      .scaling_factor = config.moe_router_topk_scaling_factor};
  if (generates && !replays &&
      chooses_by_sigmoid(weight_.size(0), of_sigmoids, x.device(), setup_.alignment())) {
    auto [experts, weights] = choose_by_sigmoid(routing.logits, expert_bias_, of_sigmoids);
    return {.experts = experts, .weights = weights, .logits = routing.logits};
  }
  const auto scores = models::sigmoid(routing.logits);
  routing.experts = experts_for(experts_by_scores(scores, expert_bias_, of_sigmoids));
  routing.weights = weights_by_scores(scores, routing.experts, of_sigmoids);
  return routing;
}

}  // namespace ferry::models
