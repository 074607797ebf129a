#include "trainer/engine/pipeline/pipeline_schedule.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <optional>
#include <utility>

#include "distckpt/base/error.h"
#include "models/pipeline_forward.h"
#include "trainer/plan/pipeline_order.h"

namespace ferry::trainer {
namespace {

using models::Pending;

// A micro-batch between its forward and its backward pass through a chunk. Only the place in
// the graph is left of a tensor that was handed on.
struct Flight {
  at::Tensor input{};              // undefined on the first stage
  torch::autograd::Edge output{};  // invalid where nothing is propagated
  at::Tensor loss{};               // of the last stage
};

// Messages that are waited for together, once.
using Exchange = std::shared_ptr<Pending>;

struct Arrival {
  at::Tensor tensor{};
  Exchange exchange{};  // null: it was handed over on this stage
};

using Place = std::pair<std::size_t, std::size_t>;  // chunk, micro-batch

class Run {
 public:
  Run(const Pipeline& pipeline,
      std::span<const models::SequencePartition> batches,
      const LossFunction& loss,
      const ForwardBackwardOptions& options)
      : pipeline_(pipeline),
        mesh_(pipeline.chunks.front()->mesh()),
        batches_(batches),
        loss_(loss),
        options_(options),
        rounds_(pipeline_rounds({.stages = static_cast<std::size_t>(mesh_.shape().pp()),
                                 .stage = static_cast<std::size_t>(mesh_.coordinates().pp),
                                 .chunks = pipeline.chunks.size(),
                                 .micro_batches = batches.size(),
                                 .forward_only = options.forward_only})),
        backwards_left_(pipeline.chunks.size(), batches.size()) {}

  std::vector<LossMetrics> run() {
    for (const auto& round : rounds_) {
      if (round.step) {
        if (round.step->forward)
          forward(*round.step, take(*round.step));
        else
          backward(*round.step, take(*round.step));
      }
      exchange(round.transfers);
      std::erase_if(under_way_, [](const Exchange& one) { return one->done(); });
    }
    for (const auto& one : under_way_) one->wait();
    return std::move(metrics_);
  }

 private:
  const models::GPTModel& model(std::size_t chunk) const { return *pipeline_.chunks[chunk]; }

  // The stage that a pass gets something from, or hands something to; -1: none.
  int source(const PipelineStep& step) const {
    const auto around = models::neighbours(mesh_, step.chunk, pipeline_.chunks.size());
    return step.forward ? around.before : around.behind;
  }
  int target(const PipelineStep& step) const {
    const auto around = models::neighbours(mesh_, step.chunk, pipeline_.chunks.size());
    return step.forward ? around.behind : around.before;
  }

  std::map<Place, Arrival>& arrivals(bool forward) { return forward ? activations_ : gradients_; }

  // The input of a pass; undefined where the pipeline begins.
  at::Tensor take(const PipelineStep& step) {
    if (source(step) < 0) return {};
    const auto arrival =
        std::move(arrivals(step.forward).extract({step.chunk, step.micro_batch}).mapped());
    if (arrival.exchange) arrival.exchange->wait();
    return arrival.tensor;
  }

  // Sends to the next chunk, or back to the one before: at once, or with the round's messages.
  void hand_over(const PipelineStep& step, const at::Tensor& tensor) {
    if (target(step) == mesh_.coordinates().pp)
      arrivals(step.forward)[{step.forward ? step.chunk + 1 : step.chunk - 1, step.micro_batch}] = {
          .tensor = tensor};
    else
      leaving_ = tensor;
  }

  void exchange(const std::vector<PipelineTransfer>& transfers) {
    const auto me = static_cast<std::size_t>(mesh_.coordinates().pp);
    std::vector<models::P2POp> messages;
    std::vector<Arrival*> received;
    for (const auto& transfer : transfers) {
      if (transfer.from == me) {
        messages.push_back({.sends = true,
                            .tensor = std::exchange(leaving_, at::Tensor()),
                            .peer = static_cast<int>(transfer.to)});
        continue;
      }
      auto& arrival = arrivals(transfer.forward)[{transfer.chunk, transfer.micro_batch}];
      arrival.tensor = models::empty_hidden(model(transfer.chunk), batches_[transfer.micro_batch]);
      messages.push_back(
          {.sends = false, .tensor = arrival.tensor, .peer = static_cast<int>(transfer.from)});
      received.push_back(&arrival);
    }
    if (messages.empty()) return;
    for (auto& [stage, pending] : pipeline_.p2p->exchange(messages)) {
      const auto one = std::make_shared<Pending>(std::move(pending));
      under_way_.push_back(one);
      for (std::size_t i = 0, taken = 0; i < messages.size(); ++i) {
        if (messages[i].sends) continue;
        if (messages[i].peer == stage) received[taken]->exchange = one;
        ++taken;
      }
    }
  }

  void forward(const PipelineStep& step, at::Tensor input) {
    Flight flight{.input = std::move(input)};
    if (flight.input.defined() && !options_.forward_only) flight.input.requires_grad_();
    auto routes =
        options_.routes ? options_.routes(step.chunk, step.micro_batch) : models::RouterReplay{};
    if (pipeline_.balancing != nullptr && !options_.forward_only)
      routes.balance = pipeline_.balancing->hook(step.micro_batch);
    const auto visual =
        options_.visual ? options_.visual(step.chunk, step.micro_batch) : models::VisualRows{};
    auto output =
        model(step.chunk)
            .forward(batches_[step.micro_batch], flight.input, options_.observe, routes, visual);
    if (target(step) < 0) {
      LossOutput result;
      const auto lose = [&] { result = loss_(model(step.chunk), output, step.micro_batch); };
      const auto& guard = pipeline_.memory.loss;
      guard ? guard(model(step.chunk), batches_[step.micro_batch], lose) : lose();
      if (metrics_.size() <= step.micro_batch) metrics_.resize(step.micro_batch + 1);
      metrics_[step.micro_batch] = std::move(result.metrics);
      output = flight.loss = std::move(result.loss);
    } else {
      hand_over(step, output.detach());
    }
    if (options_.forward_only) return;
    if (output.defined()) flight.output = torch::autograd::impl::gradient_edge(output);
    flights_[{step.chunk, step.micro_batch}] = std::move(flight);
  }

  void backward(const PipelineStep& step, at::Tensor gradient) {
    const auto flight = std::move(flights_.extract({step.chunk, step.micro_batch}).mapped());
    if (--backwards_left_[step.chunk] == 0 && pipeline_.ddp != nullptr)
      pipeline_.ddp->expect_last_backward(step.chunk);
    if (flight.loss.defined()) gradient = at::full_like(flight.loss, options_.grad_scale);
    require(flight.output.is_valid() && gradient.defined(), ErrorKind::kBug,
            "the loss of micro-batch {} cannot be propagated", step.micro_batch);
    torch::autograd::Engine::get_default_engine().execute(
        {flight.output}, {gradient}, /*keep_graph=*/false, /*create_graph=*/false,
        /*accumulate_grad=*/true);
    if (target(step) >= 0) hand_over(step, flight.input.grad());
  }

  const Pipeline& pipeline_;
  const models::ParallelState& mesh_;
  std::span<const models::SequencePartition> batches_;
  const LossFunction& loss_;
  const ForwardBackwardOptions& options_;
  std::vector<PipelineRound> rounds_;
  std::vector<std::size_t> backwards_left_;           // of each chunk
  std::map<Place, Arrival> activations_, gradients_;  // that no pass has taken yet
  at::Tensor leaving_;  // what the round's pass made for another stage
  std::map<Place, Flight> flights_;
  std::vector<Exchange> under_way_;
  std::vector<LossMetrics> metrics_;
};

}  // namespace

std::vector<LossMetrics> forward_backward(const Pipeline& pipeline,
                                          std::span<const models::SequencePartition> batches,
                                          const LossFunction& loss,
                                          const ForwardBackwardOptions& options) {
  require(!pipeline.chunks.empty() && !batches.empty(), ErrorKind::kBug,
          "a pipeline needs a chunk and a micro-batch");
  for (const auto* const chunk : pipeline.chunks) {
    for (const auto& leaf : chunk->parameters().leaves())
      require(leaf.value.storage().nbytes() > 0, ErrorKind::kBug,
              "a model computes while its parameters are on the host");
  }
  std::optional<at::NoGradGuard> no_grad;
  if (options.forward_only) no_grad.emplace();
  if (pipeline.balancing != nullptr && !options.forward_only)
    pipeline.balancing->begin(batches, options.grad_scale);
  std::vector<LossMetrics> metrics;
  const auto run = [&] { metrics = Run(pipeline, batches, loss, options).run(); };
  const auto& guard = pipeline.memory.batch;
  guard ? guard(batches, options.forward_only, run) : run();
  return metrics;
}

}  // namespace ferry::trainer
