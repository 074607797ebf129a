#include "models/transformer/moe.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>

#include "distckpt/base/error.h"
#include "models/kernels/product/linear.h"
#include "models/kernels/swiglu.h"
#include "models/kernels/whole_vectors.h"
#include "models/tensor_parallel/mappings.h"

namespace ferry::models {
namespace {

using Counts = std::vector<std::int64_t>;

Counts to_counts(const at::Tensor& tensor) {
  const auto host = tensor.to(at::kCPU).contiguous();
  const auto* const begin = host.const_data_ptr<std::int64_t>();
  return {begin, begin + host.numel()};
}

std::int64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

// The order that turns rows sorted by (source, expert), `counts` of each, into rows sorted by
// (expert, source).
at::Tensor experts_first(const Counts& counts, std::int64_t experts, const at::Tensor& like) {
  const auto sources = static_cast<std::int64_t>(counts.size()) / experts;
  Counts begin(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), begin.begin(), std::int64_t{0});
  std::vector<at::Tensor> order;
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    for (std::int64_t source = 0; source < sources; ++source) {
      const auto i = static_cast<std::size_t>(source * experts + expert);
      order.push_back(at::arange(begin[i], begin[i] + counts[i], at::kLong));
    }
  }
  return at::cat(order).to(like.device());
}

at::Tensor undo(const at::Tensor& order) {
  auto back = at::empty_like(order);
  back.index_put_({order}, at::arange(order.size(0), order.options()));
  return back;
}

// Rows in another order. The backward gathers the gradient by the inverse; the backward of
// index_select would add rows up, on a GPU in any order.
class Permute : public torch::autograd::Function<Permute> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& rows,
                            const at::Tensor& order,
                            const at::Tensor& inverse) {
    context->save_for_backward({inverse});
    return rows.index_select(0, order);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0].index_select(0, context->get_saved_variables()[0]), at::Tensor(),
            at::Tensor()};
  }
};

// The row of a token for each of its choices, in the order of the experts; `inverse` says where
// each choice went. The gradients of a token's rows are added in the order of its choices.
class RowsOfChoices : public torch::autograd::Function<RowsOfChoices> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& x,
                            const at::Tensor& order,
                            const at::Tensor& inverse,
                            std::int64_t topk) {
    context->save_for_backward({inverse});
    context->saved_data["topk"] = topk;
    return x.index_select(0, at::div(order, topk, "trunc"));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto topk = context->saved_data["topk"].toInt();
    const auto by_token = grads[0].index_select(0, context->get_saved_variables()[0]);
    return {by_token.view({-1, topk, by_token.size(1)}).sum(1), at::Tensor(), at::Tensor(),
            at::Tensor()};
  }
};

// Sends a batch of routed rows to the ranks of their experts, and brings the results back.
class Dispatcher {
 public:
  // `counts`: rows of this rank for each expert of the layer.
  Dispatcher(const ModelSetup& setup, const at::Tensor& counts)
      : ep_(setup.mesh.ep()),
        etp_(setup.mesh.etp()),
        bitwise_(setup.alignment() == Alignment::kBitwise),
        local_experts_(setup.config.num_moe_experts / ep_.size()) {
    const auto by_rank = counts.view({ep_.size(), local_experts_});
    send_ = to_counts(by_rank.sum(1));
    // [sources, local experts]: what every rank sends to this one.
    const auto from = ep_.all_to_all(by_rank.contiguous());
    receive_ = to_counts(from.sum(1));
    arrived_ = sum(receive_);
    const auto gathered = etp_.all_gather(from);  // [etp * sources, local experts]
    counts_ = to_counts(gathered.flatten());
    const auto blocks = to_counts(gathered.view({etp_.size(), -1}).sum(1));
    block_ = *std::ranges::max_element(blocks);
    order_ = experts_first(counts_, local_experts_, counts);
    inverse_ = undo(order_);
    if (etp_.size() == 1) return;
    // Blocks are padded to one length while they are gathered.
    std::vector<at::Tensor> rows;
    for (int rank = 0; rank < etp_.size(); ++rank) {
      const auto begin = rank * block_;
      rows.push_back(at::arange(begin, begin + blocks[static_cast<std::size_t>(rank)], at::kLong));
    }
    unpadded_ = at::cat(rows).to(counts.device());
  }

  // Rows of this rank, by expert -> rows for this rank's experts, those of the first one first.
  at::Tensor dispatch(const at::Tensor& rows) const {
    auto arrived = all_to_all(rows, ep_, send_, receive_);
    if (etp_.size() > 1) {
      const auto padded = at::constant_pad_nd(arrived, {0, 0, 0, block_ - arrived_});
      arrived = gather_from_sequence_parallel_region(padded, etp_).index_select(0, unpadded_);
    }
    return Permute::apply(arrived, order_, inverse_);
  }

  // The results of this rank's experts -> the results of this rank's rows, by expert.
  at::Tensor combine(const at::Tensor& results) const {
    auto rows = results;
    if (etp_.size() > 1 && bitwise_)
      rows = gather_from_tensor_model_parallel_region(rows, etp_, /*replicated=*/false);
    rows = Permute::apply(rows, inverse_, order_);
    if (etp_.size() > 1) {
      const auto padded = at::zeros({etp_.size() * block_, rows.size(1)}, rows.options())
                              .index_copy(0, unpadded_, rows);
      const auto mine = bitwise_ ? padded.narrow(0, etp_.rank() * block_, block_)
                                 : reduce_scatter_to_sequence_parallel_region(padded, etp_);
      rows = mine.narrow(0, 0, arrived_);
    }
    return all_to_all(rows, ep_, receive_, send_);
  }

  // Rows of each of this rank's experts.
  Counts rows_per_expert() const {
    Counts rows(static_cast<std::size_t>(local_experts_));
    for (std::size_t i = 0; i < counts_.size(); ++i)
      rows[i % static_cast<std::size_t>(local_experts_)] += counts_[i];
    return rows;
  }

 private:
  const ProcessGroup& ep_;
  const ProcessGroup& etp_;
  bool bitwise_;
  std::int64_t local_experts_;
  Counts send_, receive_;  // rows to and from each rank of ep_
  std::int64_t arrived_ = 0;
  Counts counts_;  // of each (etp rank, source, local expert)
  std::int64_t block_ = 0;
  at::Tensor order_, inverse_, unpadded_;
};

}  // namespace

Experts::Experts(const ModelSetup& setup, Parameters& parameters, const std::string& prefix)
    : setup_(setup) {
  const auto local = setup.config.num_moe_experts / setup.mesh.ep().size();
  std::vector<std::string> fc1;
  std::vector<std::string> fc2;
  for (std::int64_t i = 0; i < local; ++i) {
    const auto expert =
        fmt::format("{}mlp.experts.experts.{}.", prefix, setup.mesh.ep().rank() * local + i);
    fc1.push_back(expert + "linear_fc1.weight");
    fc2.push_back(expert + "linear_fc2.weight");
  }
  fc1_ = parameters.take_stacked(fc1);
  fc2_ = parameters.take_stacked(fc2);
}

at::Tensor Experts::forward(const at::Tensor& rows, const Counts& counts) const {
  const auto alignment = setup_.alignment();
  const auto& etp = setup_.mesh.etp();
  at::Tensor ends;  // of each expert's rows, on a GPU: one kernel for all, of the same bits
  if (rows.is_cuda()) {
    ends = at::empty({static_cast<std::int64_t>(counts.size())}, at::kInt);
    std::inclusive_scan(counts.begin(), counts.end(), ends.mutable_data_ptr<std::int32_t>());
    ends = ends.to(rows.device());
  }
  const auto each = [&](const at::Tensor& x, const at::Tensor& weights) {
    if (x.is_cuda() && x.size(0) > 0) return at::_grouped_mm(x, weights.transpose(1, 2), ends);
    std::vector<at::Tensor> parts;
    std::int64_t begin = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (counts[i] > 0) {
        parts.push_back(linear_slice(x.narrow(0, begin, counts[i]),
                                     weights.select(0, static_cast<std::int64_t>(i)), {},
                                     alignment));
      }
      begin += counts[i];
    }
    // A product without rows is still computed, so that every weight has a gradient.
    return parts.empty() ? at::linear(x, weights.select(0, 0)) : at::cat(parts);
  };
  auto hidden = swiglu(each(rows, fc1_));
  if (etp.size() > 1 && alignment == Alignment::kBitwise)
    hidden = gather_from_tensor_model_parallel_region(hidden, etp, /*replicated=*/false);
  return each(hidden, fc2_);
}

MoELayer::MoELayer(const ModelSetup& setup, Parameters& parameters, const std::string& prefix)
    : setup_(setup),
      norm_(parameters.take(prefix + "pre_mlp_layernorm.weight",
                            setup.tensor_parallel.between_layers())),
      router_(setup, parameters, prefix),
      experts_(setup, parameters, prefix) {
  if (setup.config.moe_shared_expert_intermediate_size == 0) return;
  shared_.emplace(setup.tensor_parallel, parameters, prefix + "mlp.shared_experts.");
  shared_gate_ = parameters.take_if(prefix + "mlp.shared_experts.gate_weight",
                                    setup.tensor_parallel.between_layers());
}

at::Tensor MoELayer::forward(const at::Tensor& normed, const RouterChoice& choice) const {
  const auto& parallel = setup_.tensor_parallel;
  // Tensor parallel ranks that have the same tokens send a share of them each.
  at::Tensor output;
  if (parallel.sequence_parallel || parallel.group->size() == 1) {
    output = route_and_compute(normed, choice);
  } else {
    const auto mine = scatter_to_sequence_parallel_region(normed, *parallel.group);
    output = gather_from_sequence_parallel_region(route_and_compute(mine, choice), *parallel.group,
                                                  /*replicated=*/true);
  }
  if (!shared_) return output;
  auto shared = shared_->forward(normed);
  if (shared_gate_.defined())
    shared = models::sigmoid(linear(normed, shared_gate_, {}, setup_.alignment())) * shared;
  return output + shared;
}

at::Tensor MoELayer::route_and_compute(const at::Tensor& x, const RouterChoice& choice) const {
  const auto topk = setup_.config.moe_router_topk;
  const auto routing = router_.forward(x, choice);
  const auto choices = routing.experts.reshape({-1});
  const auto order = at::argsort(choices, /*stable=*/true, 0, /*descending=*/false);
  const auto inverse = undo(order);
  const auto counts = at::bincount(choices, {}, setup_.config.num_moe_experts);
  const Dispatcher dispatcher(setup_, counts);

  const auto rows = RowsOfChoices::apply(x, order, inverse, topk);
  const auto results =
      dispatcher.combine(experts_.forward(dispatcher.dispatch(rows), dispatcher.rows_per_expert()));
  const auto weights = Permute::apply(routing.weights.reshape({-1}), order, inverse);
  return Permute::apply(results * weights.unsqueeze(1), inverse, order)
      .view({x.size(0), topk, -1})
      .sum(1)
      .to(x.scalar_type());
}

}  // namespace ferry::models
