#include "models/transformer/token_dispatcher.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "models/tensor_parallel/mappings.h"

namespace ferry::models {

namespace {

using Counts = std::vector<std::int64_t>;

std::int64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

}  // namespace

struct TokenDispatcher::Route {
  const ProcessGroup& ep;
  const ProcessGroup& etp;
  bool bitwise;
  std::int64_t topk;
  bool sends_weights;

  // Ways of this rank's tokens.
  ExpertOrder sent{};     // their choices: first those that stand for rows, sorted by rank
  Counts send{};          // rows to each rank of ep
  at::Tensor of_ranks{};  // kBitwise: the place of each choice, sorted by rank
  Counts take_results{};  // kBitwise: choices that each rank answers

  // Rows that arrive.
  Counts receive{};          // from each rank of ep
  std::int64_t arrived = 0;  // all of them
  std::int64_t block = 0;    // those of the etp rank that has the most, to which all are padded
  std::int64_t choices = 0;  // of this rank's experts, in the rows of all etp ranks
  ExpertOrder places{};      // of [rows of all etp ranks * topk] choices, these first
  at::Tensor weights{};      // [rows of all etp ranks, topk]
  Counts send_results{};     // kBitwise: choices of this rank's rows, for each rank of ep
  at::Tensor returned{};     // kBitwise: the places of these, in the order of rows and choices
  Pending moved{};           // the rows
  std::pair<at::Tensor, Pending> gradients{};  // of this rank's rows, on their way back

  at::Tensor end(const ExpertOrder& of) const { return of.ends.narrow(0, of.ends.size(0) - 1, 1); }
  // The sum of what each rank has of a token: rows [rows sent, n] -> [tokens, n].
  at::Tensor sum_over_ranks(const at::Tensor& rows) const {
    const auto tokens = sent.order.size(0) / topk;
    return combine_choices(rows, sent.inverse, at::ones({tokens, topk}, rows.options()), end(sent));
  }
  // The rows of this rank's etp peers as well, each block padded by `filler`.
  at::Tensor gather_blocks(const at::Tensor& rows, std::int64_t filler = 0) const {
    if (etp.size() == 1) return rows;
    return etp.all_gather(at::constant_pad_nd(rows, {0, 0, 0, block - arrived}, filler));
  }
  // Sets `returned`.
  void order_results() {
    const auto own = places.inverse.narrow(0, etp.rank() * block * topk, arrived * topk);
    const auto of_others = own.ge(end(places)).to(at::kLong);
    const auto mine = expert_order(of_others, {0, 1}).order.narrow(0, 0, sum(send_results));
    returned = own.index_select(0, mine);
  }
  // The sum over etp ranks of this rank's block.
  at::Tensor sum_of_block(const at::Tensor& rows) const {
    return etp.size() == 1 ? rows : etp.reduce_scatter(rows).narrow(0, 0, arrived);
  }
};

namespace {

using Route = TokenDispatcher::Route;

// A stream of this thread's on `device`.
c10::Stream stream_beside(c10::Device device) {
  static thread_local std::optional<c10::Stream> stream;
  if (!stream || stream->device() != device)
    stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  return *stream;
}

// Sums the results of choices over ranks. Its gradient travels as the rows did: a token's goes once
// to each rank, where the gradients of results and weights are computed.
class CombineOverRanks : public torch::autograd::Function<CombineOverRanks> {
 public:
  struct Holder : torch::CustomClassHolder {
    explicit Holder(std::shared_ptr<const Route> of) : route(std::move(of)) {}
    std::shared_ptr<const Route> route;
  };

  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& results,
                            const at::Tensor& weights,
                            const c10::intrusive_ptr<Holder>& holder) {
    context->save_for_backward({results});
    context->saved_data["route"] = c10::IValue::make_capsule(holder);
    const auto& route = *holder->route;
    if (route.bitwise) return one_by_one(route, results, weights);
    const auto sums =
        combine_choices(results, route.places.inverse, route.weights, route.end(route.places));
    return route.sum_over_ranks(
        route.ep.all_to_all(route.sum_of_block(sums), route.receive, route.send));
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto capsule = context->saved_data["route"].toCapsule();
    const auto& route = *static_cast<const Holder*>(capsule.get())->route;
    const auto results = context->get_saved_variables()[0];
    const auto rows = gather_choices(grads[0], route.sent, route.topk, sum(route.send));
    auto of_rows = route.gather_blocks(route.ep.all_to_all(rows, route.send, route.receive));
    if (const auto columns = results.size(1); columns < of_rows.size(1))
      of_rows = of_rows.narrow(1, route.etp.rank() * columns, columns);
    auto gradients = combine_choices_backward(of_rows, results, route.places, route.weights,
                                              route.end(route.places));
    const auto of_weights = route.sum_over_ranks(
        route.ep.all_to_all(route.sum_of_block(gradients.weights), route.receive, route.send));
    return {std::move(gradients.results), of_weights, at::Tensor()};
  }

 private:
  // Results return in the order of the rows, and those of a row in that of the choices.
  static at::Tensor one_by_one(const Route& route,
                               const at::Tensor& results,
                               const at::Tensor& weights) {
    const auto rows = route.etp.size() == 1 ? results : route.etp.all_gather_channels(results);
    const auto returned = route.ep.all_to_all(
        gather_choices(rows, {.order = route.returned}, 1, route.returned.size(0)),
        route.send_results, route.take_results);
    return combine_choices(returned, route.of_ranks, weights);
  }
};

}  // namespace

TokenDispatcher::TokenDispatcher(const ModelSetup& setup,
                                 const at::Tensor& x,
                                 const Routing& routing)
    : local_(setup.config.num_moe_experts / setup.mesh.ep().size()),
      x_(x),
      weights_(routing.weights) {
  const bool bitwise = setup.alignment() == Alignment::kBitwise;
  const auto& ep = setup.mesh.ep();
  const auto& experts = routing.experts;
  const auto topk = experts.size(1);
  auto by_rank = expert_order(at::div(experts.flatten(), local_, "trunc"), {0, ep.size()});
  route_ = std::make_shared<Route>(
      Route{.ep = ep,
            .etp = setup.mesh.etp(),
            .bitwise = bitwise,
            .topk = topk,
            .sends_weights = !bitwise || at::GradMode::is_enabled(),
            .sent = expert_order(first_of_ranks(experts, local_), {0, ep.size()}),
            .of_ranks = bitwise ? by_rank.inverse : at::Tensor()});
  const auto counts = at::diff(at::stack({route_->sent.ends, by_rank.ends}, 1).to(at::kLong), 1, 0,
                               at::zeros({1, 2}, experts.options()));
  if (counts.is_cuda())
    exchange_beside(counts);
  else
    exchange(counts);
  // Meanwhile as many rows as there may be.
  const auto most = x.size(0) * std::min<std::int64_t>(topk, ep.size());
  const at::NoGradGuard no_grad;
  rows_ = gather_choices(x, route_->sent, topk, most);
  const auto firsts = route_->sent.order.narrow(0, 0, most);
  choices_ = choices_of_rows(experts, firsts, local_);
  if (!route_->sends_weights) return;
  const auto of_rows = gather_choices(weights_, route_->sent, topk, most).to(at::kFloat);
  choices_ = at::cat({choices_, of_rows.view(at::kInt)}, 1);
}

// counts [ranks of ep, 2]: rows to each rank, and choices that they stand for. numbers_: the same,
// and then those that come from each rank to this one and each of its etp peers.
void TokenDispatcher::exchange(const at::Tensor& counts) {
  const auto arriving = route_->etp.all_gather(route_->ep.all_to_all(counts));
  numbers_ = at::cat({counts, arriving});
}

// On a stream of its own, so that what the caller does next does not wait, nor the host for that.
void TokenDispatcher::exchange_beside(const at::Tensor& counts) {
  const c10::impl::VirtualGuardImpl device(counts.device().type());
  const auto current = device.getStream(counts.device());
  const auto beside = stream_beside(counts.device());
  c10::Event ready(counts.device().type());
  ready.record(current);
  ready.block(beside);
  counts.record_stream(beside);
  const c10::StreamGuard guard(beside);
  exchange(counts);
  const auto on_device = numbers_;
  numbers_ = at::empty(on_device.sizes(), at::TensorOptions(at::kLong).pinned_memory(true));
  numbers_.copy_(on_device, /*non_blocking=*/true);
  known_.emplace(counts.device().type());
  known_->record(beside);
}

void TokenDispatcher::wait() {
  if (known_) known_->synchronize();
  auto& route = *route_;
  const auto* next = numbers_.const_data_ptr<std::int64_t>();
  const auto take = [&](Counts& rows, Counts& choices) {
    for (int rank = 0; rank < route.ep.size(); ++rank) {
      rows.push_back(*next++);
      choices.push_back(*next++);
    }
  };
  take(route.send, route.take_results);
  for (int rank = 0; rank < route.etp.size(); ++rank) {
    Counts rows;
    Counts choices;
    take(rows, choices);
    route.block = std::max(route.block, sum(rows));
    route.choices += sum(choices);
    if (rank != route.etp.rank()) continue;
    route.receive = std::move(rows);
    route.send_results = std::move(choices);
  }
  route.arrived = sum(route.receive);
}

void TokenDispatcher::send() {
  wait();
  auto& route = *route_;
  const auto sent = sum(route.send);
  const auto forward = [&](const at::Tensor&) {
    // Choices are sorted while rows travel.
    auto choices = route.ep.all_to_all(choices_.narrow(0, 0, sent), route.send, route.receive);
    auto [rows, moved] =
        route.ep.begin_all_to_all(rows_.narrow(0, 0, sent), route.send, route.receive);
    route.moved = std::move(moved);
    choices = route.gather_blocks(choices, -1);
    const auto experts = choices.narrow(1, 0, route.topk).to(at::kLong).flatten();
    if (route.sends_weights)
      route.weights = choices.narrow(1, route.topk, route.topk)
                          .contiguous()
                          .view(at::kFloat)
                          .to(weights_.scalar_type());
    route.places = expert_order(experts, {0, local_});
    if (route.bitwise) route.order_results();
    return rows;
  };
  const auto backward = [route = route_](const at::Tensor&) {
    auto [gradients, moved] = std::exchange(route->gradients, {});
    moved.wait();
    return route->sum_over_ranks(gradients);
  };
  arriving_ = mapped(x_, forward, backward);
  rows_ = at::Tensor();
  choices_ = at::Tensor();
}

at::Tensor TokenDispatcher::receive() {
  const auto forward = [&route = *route_](const at::Tensor& rows) {
    route.moved.wait();
    route.moved = Pending();
    return gather_choices(route.gather_blocks(rows), route.places, route.topk, route.choices);
  };
  // The gradients travel until backward of send() waits for them; its argument only has the shape.
  const auto backward = [route = route_](const at::Tensor& grads) {
    const auto all = route->places.order.size(0) / route->topk;
    const auto sums = route->sum_of_block(
        combine_choices(grads, route->places.inverse, at::ones({all, route->topk}, grads.options()),
                        route->end(route->places)));
    route->gradients = route->ep.begin_all_to_all(sums, route->receive, route->send);
    return sums;
  };
  return mapped(std::exchange(arriving_, {}), forward, backward);
}

const at::Tensor& TokenDispatcher::ends() const {
  return route_->places.ends;
}

at::Tensor TokenDispatcher::combine(const at::Tensor& results) const {
  return CombineOverRanks::apply(results, weights_,
                                 c10::make_intrusive<CombineOverRanks::Holder>(route_));
}

}  // namespace ferry::models
