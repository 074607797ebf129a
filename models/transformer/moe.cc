#include "models/transformer/moe.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "distckpt/base/error.h"
#include "models/kernels/experts/experts.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/swiglu.h"
#include "models/kernels/whole_vectors.h"
#include "models/tensor_parallel/mappings.h"
#include "models/transformer/token_dispatcher.h"

namespace ferry::models {
Experts::Experts(const ModelSetup& setup, Parameters& parameters, const std::string& prefix)
    : setup_(setup) {
  const auto local = setup.config.num_moe_experts / setup.mesh.ep().size();
  const auto take = [&](const char* name) {
    std::vector<std::string> keys;
    for (std::int64_t i = 0; i < local; ++i)
      keys.push_back(fmt::format("{}mlp.experts.experts.{}.{}", prefix,
                                 setup.mesh.ep().rank() * local + i, name));
    return parameters.has(keys.at(0)) ? parameters.take_stacked(keys) : at::Tensor();
  };
  fc1_ = take("linear_fc1.weight");
  fc1_bias_ = take("linear_fc1.bias");
  fc2_ = take("linear_fc2.weight");
  fc2_bias_ = take("linear_fc2.bias");
}

at::Tensor Experts::activated(const at::Tensor& gate_up) const {
  return setup_.config.activation == Activation::kQuickGeglu ? quick_geglu(gate_up, geglu_options())
                                                             : swiglu(gate_up);
}

QuickGeglu Experts::geglu_options() const {
  const auto& config = setup_.config;
  return {.clamp = config.activation_func_clamp_value, .offset = config.glu_linear_offset};
}

// Each rank of an expert tensor parallel group adds its columns of the bias: to those of the result
// that it has, or, beside zeros, to its summand.
at::Tensor Experts::own_fc2_bias() const {
  const auto& etp = setup_.mesh.etp();
  if (!fc2_bias_.defined() || etp.size() == 1) return fc2_bias_;
  const auto all = copy_to_tensor_model_parallel_region(fc2_bias_, etp);
  const auto columns = all.size(1) / etp.size();
  const auto before = etp.rank() * columns;
  auto mine = all.narrow(1, before, columns);
  if (setup_.alignment() == Alignment::kBitwise) return mine;
  return at::constant_pad_nd(mine, {before, all.size(1) - before - columns});
}

at::Tensor Experts::of_all_ranks(const at::Tensor& hidden) const {
  const auto& etp = setup_.mesh.etp();
  return etp.size() > 1 && setup_.alignment() == Alignment::kBitwise
             ? gather_from_tensor_model_parallel_region(hidden, etp, /*replicated=*/false)
             : hidden;
}

at::Tensor Experts::forward(const at::Tensor& rows, const at::Tensor& ends) const {
  const auto alignment = setup_.alignment();
  // A bias is added to the rounded product.
  const auto each = [&](const at::Tensor& x, const at::Tensor& weights, const at::Tensor& biases) {
    const auto plus_bias = [&](const at::Tensor& y, std::int64_t expert) {
      return biases.defined() ? y + biases.select(0, expert) : y;
    };
    // On a GPU one kernel serves all experts, with the same bits.
    if (x.is_cuda() && x.size(0) > 0) {
      const auto y = at::_grouped_mm(x, weights.transpose(1, 2), ends);
      return biases.defined() ? add_expert_biases(y, {.values = biases, .ends = ends}) : y;
    }
    std::vector<at::Tensor> parts;
    std::int64_t begin = 0;
    for (std::int64_t i = 0; x.size(0) > 0 && i < ends.size(0); ++i) {
      const std::int64_t end = ends.const_data_ptr<std::int32_t>()[i];
      if (end > begin)
        parts.push_back(plus_bias(
            linear_slice(x.narrow(0, begin, end - begin), weights.select(0, i), {}, alignment), i));
      begin = end;
    }
    // A product without rows is still computed, so that every weight has a gradient.
    if (parts.empty()) return plus_bias(at::linear(x, weights.select(0, 0)), 0);
    if (begin < x.size(0))
      parts.push_back(at::zeros({x.size(0) - begin, weights.size(1)}, x.options()));
    return at::cat(parts);
  };
  // On a GPU one kernel adds the bias, too.
  const bool fuses_bias = rows.is_cuda() && rows.size(0) > 0 && fc1_bias_.defined() &&
                          setup_.config.activation == Activation::kQuickGeglu;
  const auto activate = [this, ends, fuses_bias](const at::Tensor& gate_up) {
    return of_all_ranks(
        fuses_bias ? quick_geglu(gate_up, {.values = fc1_bias_, .ends = ends}, geglu_options())
                   : activated(gate_up));
  };
  const auto gate_up = each(rows, fc1_, fuses_bias ? at::Tensor() : fc1_bias_);
  const auto hidden = activate(gate_up);
  auto results = each(hidden, fc2_, own_fc2_bias());
  if (setup_.recompute.selects(&Recompute::Modules::moe_act))
    discard_output(hidden, results, [activate, gate_up] { return activate(gate_up); });
  return results;
}

bool Experts::may_use_kernels() const {
  const auto activation = setup_.config.activation;
  return !at::GradMode::is_enabled() &&
         (activation == Activation::kSilu || activation == Activation::kQuickGeglu);
}

// Ranks of an expert tensor parallel group would each add the whole bias, and in kBitwise gather
// between the products.
bool Experts::takes_few(const at::Tensor& choices) const {
  const auto alignment = setup_.alignment();
  const bool whole = setup_.mesh.etp().size() == 1;
  return (whole || (!fc1_bias_.defined() && alignment == Alignment::kFast)) &&
         setup_.mesh.ep().size() == 1 && may_use_kernels() &&
         few_tokens_supported(weights(), choices, alignment);
}

at::Tensor Experts::forward_few(const at::Tensor& x,
                                const at::Tensor& choices,
                                const at::Tensor& of_choices) const {
  return apply_experts_to_few_tokens(x, choices, of_choices, weights(), setup_.alignment());
}

// Grouped products are faster for more rows of an expert (tests/bench/kernels/experts_bench.cc).
at::Tensor Experts::generate(const at::Tensor& x, const ExpertOrder& places) const {
  constexpr std::int64_t kMostRowsOfExpert = 48;
  const auto& config = setup_.config;
  const auto choices = places.order.size(0);
  if (choices > kMostRowsOfExpert * config.num_moe_experts || !may_use_kernels() ||
      !serves_experts(weights(), setup_.alignment()))
    return forward(gather_choices(x, places, config.moe_router_topk, choices), places.ends);
  const auto hidden =
      of_all_ranks(gated_expert_products(x, places, config.moe_router_topk, weights()));
  return expert_products(hidden, places.ends, fc2_, own_fc2_bias());
}

ExpertWeights Experts::weights() const {
  ExpertWeights all{.fc1 = fc1_, .fc2 = fc2_, .fc1_bias = fc1_bias_, .fc2_bias = fc2_bias_};
  if (setup_.config.activation == Activation::kQuickGeglu) all.quick = geglu_options();
  return all;
}

MoELayer::MoELayer(const ModelSetup& setup, Parameters& parameters, const std::string& prefix)
    : setup_(setup),
      norm_(parameters.take(prefix + "pre_mlp_layernorm.weight",
                            setup.tensor_parallel.between_layers())),
      router_(setup, parameters, prefix),
      experts_(setup, parameters, prefix) {
  if (setup.config.moe_shared_expert_intermediate_size == 0) return;
  shared_.emplace(setup, parameters, prefix + "mlp.shared_experts.");
  shared_gate_ = parameters.take_if(prefix + "mlp.shared_experts.gate_weight",
                                    setup.tensor_parallel.between_layers());
}

at::Tensor MoELayer::forward(const at::Tensor& normed, const RouterChoice& choice) const {
  return dispatch(normed, choice, &TopKRouter::forward);
}

at::Tensor MoELayer::dispatch(const at::Tensor& normed,
                              const RouterChoice& choice,
                              Route route) const {
  const auto& parallel = setup_.tensor_parallel;
  at::Tensor of_shared;
  const auto share = [&] { of_shared = shared(normed); };
  at::Tensor output;
  if (parallel.sequence_parallel || parallel.group->size() == 1) {
    output = compute_routed(normed, (router_.*route)(normed, choice), share);
  } else {
    // Tensor parallel ranks that have the same tokens send a share of them each.
    const auto mine = scatter_to_sequence_parallel_region(normed, *parallel.group);
    output = gather_from_sequence_parallel_region(
        compute_routed(mine, (router_.*route)(mine, choice), share), *parallel.group,
        /*replicated=*/true);
  }
  return of_shared.defined() ? output + of_shared : output;
}

at::Tensor MoELayer::shared(const at::Tensor& normed) const {
  if (!shared_) return {};
  auto output = shared_->forward(normed);
  if (!shared_gate_.defined()) return output;
  return models::sigmoid(linear(normed, shared_gate_, {}, setup_.alignment())) * output;
}

bool MoELayer::generates_on_device(const ParallelState& mesh) {
  if (gathers_rows(mesh)) return true;
  const auto& ranks = mesh.ep().size() > 1 ? mesh.ep() : mesh.etp();
  const bool of_one_kind = mesh.ep().size() == 1 || mesh.etp().size() == 1;
  return of_one_kind &&
         (mesh.tp().size() == 1 ? ranks.size() == 1 : ranks.ranks() == mesh.tp().ranks());
}

bool MoELayer::gathers_rows(const ParallelState& mesh) {
  return mesh.etp().size() == 1 && mesh.ep().size() > mesh.tp().size() &&
         mesh.ep().size() % mesh.tp().size() == 0;
}

at::Tensor MoELayer::generate(const at::Tensor& normed,
                              const RouterChoice& choice,
                              const InferenceContext& context) const {
  const auto& mesh = setup_.mesh;
  if (!generates_on_device(mesh) || (gathers_rows(mesh) && !context.has_equal_rows()))
    return dispatch(normed, choice, &TopKRouter::generate);
  const auto output = compute_own_experts(normed, choice);
  const auto of_shared = shared(normed);
  return of_shared.defined() ? output + of_shared : output;
}

// Tensor parallel ranks have the same rows; where more ranks share the experts, they gather those
// of all, an equal share from each. Each rank computes what its experts, or its part of every
// expert, give to all rows.
at::Tensor MoELayer::compute_own_experts(const at::Tensor& rows, const RouterChoice& choice) const {
  const auto& ep = setup_.mesh.ep();
  const auto& etp = setup_.mesh.etp();
  const auto& tp = setup_.mesh.tp();
  const bool bitwise = setup_.alignment() == Alignment::kBitwise;
  const bool gathers = gathers_rows(setup_.mesh);
  const auto share = rows.size(0) / tp.size();
  const auto x = gathers ? ep.all_gather(rows.narrow(0, tp.rank() * share, share)) : rows;
  auto of_all = choice;
  if (choice.record) {  // those of this rank's share of the rows
    of_all.record = [&](const at::Tensor& experts) {
      choice.record(experts.narrow(0, (gathers ? ep : tp).rank() * share, share));
    };
  }
  const auto routing = router_.generate(x, of_all);
  const auto of_all_shares = [&](const at::Tensor& mine) {
    return tp.size() > 1 ? tp.all_gather(mine) : mine;
  };
  const auto sum_over_ranks = [&](const at::Tensor& part) {
    if (gathers) return of_all_shares(ep.reduce_scatter(part));
    if (tp.size() == 1) return part;
    return bitwise ? gather_from_tensor_model_parallel_region(part, etp, /*replicated=*/true)
                   : tp.all_reduce(part);
  };
  if (experts_.takes_few(routing.experts))
    return sum_over_ranks(experts_.forward_few(x, routing.experts, routing.weights));
  const auto local = setup_.config.num_moe_experts / ep.size();
  const auto places = expert_order(routing.experts.reshape({-1}), {ep.rank() * local, local});
  const auto& inverse = places.inverse;
  const auto results = experts_.generate(x, places);
  at::Tensor end;  // of the rows that this rank has computed
  if (ep.size() > 1) end = places.ends.narrow(0, local - 1, 1);
  if (ep.size() > 1 && bitwise) {
    // Each rank sums the choices of its part of the rows.
    const auto part = x.size(0) / ep.size();
    const auto sums = combine_choices(ep.all_to_all_rows(results, inverse, end), {},
                                      routing.weights.narrow(0, ep.rank() * part, part));
    return gathers ? of_all_shares(sums) : ep.all_gather(sums);
  }
  return sum_over_ranks(combine_choices(results, inverse, routing.weights, end));
}

at::Tensor MoELayer::compute_routed(const at::Tensor& x,
                                    const Routing& routing,
                                    const std::function<void()>& meanwhile) const {
  if (setup_.mesh.ep().size() > 1 || setup_.mesh.etp().size() > 1) {
    TokenDispatcher dispatcher(setup_, x, routing);
    dispatcher.send();
    meanwhile();
    const auto rows = dispatcher.receive();
    return dispatcher.combine(experts_.forward(rows, dispatcher.ends()));
  }
  const auto places =
      expert_order(routing.experts.reshape({-1}), {0, setup_.config.num_moe_experts});
  const auto results =
      experts_.forward(rows_of_choices(x, places, setup_.config.moe_router_topk), places.ends);
  auto output = combine_choices_of(places, results, routing.weights);
  meanwhile();
  return output;
}

}  // namespace ferry::models
