#include "trainer/pipeline_schedule.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <utility>

#include "distckpt/error.h"
#include "models/pipeline_forward.h"
#include "models/world.h"
#include "trainer/pipeline_order.h"

namespace ferry::trainer {
namespace {

using models::Pending;

// A micro-batch between its forward and its backward pass through a chunk. Of what was handed on
// only the place in the graph is left.
struct Flight {
  at::Tensor input{};              // undefined on the first stage
  torch::autograd::Edge output{};  // invalid where nothing is propagated
  at::Tensor loss{};               // of the last stage
  Pending sent{};
};

struct Arrival {
  at::Tensor tensor{};
  Pending pending{};
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
        steps_(pipeline_order({.stages = static_cast<std::size_t>(mesh_.shape().pp()),
                               .stage = static_cast<std::size_t>(mesh_.coordinates().pp),
                               .chunks = pipeline.chunks.size(),
                               .micro_batches = batches.size(),
                               .forward_only = options.forward_only})),
        asks_early_(!mesh_.world().device().is_cuda()),
        backwards_left_(pipeline.chunks.size(), batches.size()),
        arrivals_(steps_.size()) {}

  std::vector<LossMetrics> run() {
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      begin_receive(i);
      if (asks_early_ && i + 1 < steps_.size()) begin_receive(i + 1);
      auto received = finish_receive(i);
      if (steps_[i].forward)
        forward(steps_[i], std::move(received));
      else
        backward(steps_[i], received);
      forget_what_arrived();
    }
    for (auto& [place, flight] : flights_) flight.sent.wait();
    for (auto& pending : sending_) pending.wait();
    return std::move(metrics_);
  }

 private:
  const models::GPTModel& model(const PipelineStep& step) const {
    return *pipeline_.chunks[step.chunk];
  }

  // The stage that a pass gets something from, or hands something to; -1: none.
  int source(const PipelineStep& step) const {
    const auto around = models::neighbours(mesh_, step.chunk, pipeline_.chunks.size());
    return step.forward ? around.before : around.behind;
  }
  int target(const PipelineStep& step) const {
    const auto around = models::neighbours(mesh_, step.chunk, pipeline_.chunks.size());
    return step.forward ? around.behind : around.before;
  }
  bool is_remote(int stage) const { return stage >= 0 && stage != mesh_.coordinates().pp; }

  void begin_receive(std::size_t i) {
    const auto& step = steps_[i];
    auto& arrival = arrivals_[i];
    if (!is_remote(source(step)) || arrival.tensor.defined()) return;
    arrival.tensor = models::empty_hidden(model(step), batches_[step.micro_batch]);
    arrival.pending = step.forward ? pipeline_.p2p->recv_forward(arrival.tensor)
                                   : pipeline_.p2p->recv_backward(arrival.tensor);
  }

  at::Tensor finish_receive(std::size_t i) {
    const auto& step = steps_[i];
    if (source(step) >= 0 && !is_remote(source(step)))
      return std::exchange(handed_[{step.chunk, step.micro_batch}], at::Tensor());
    arrivals_[i].pending.wait();
    return std::exchange(arrivals_[i].tensor, at::Tensor());
  }

  // To the next chunk, or back to the one before.
  Pending hand_over(const PipelineStep& step, const at::Tensor& tensor) {
    if (is_remote(target(step)))
      return step.forward ? pipeline_.p2p->send_forward(tensor)
                          : pipeline_.p2p->send_backward(tensor);
    handed_[{step.forward ? step.chunk + 1 : step.chunk - 1, step.micro_batch}] = tensor;
    return {};
  }

  void forward(const PipelineStep& step, at::Tensor input) {
    Flight flight{.input = std::move(input)};
    if (flight.input.defined() && !options_.forward_only) flight.input.requires_grad_();
    auto output = model(step).forward(batches_[step.micro_batch], flight.input, options_.observe);
    if (target(step) < 0) {
      auto result = loss_(model(step), output, step.micro_batch);
      if (metrics_.size() <= step.micro_batch) metrics_.resize(step.micro_batch + 1);
      metrics_[step.micro_batch] = std::move(result.metrics);
      output = flight.loss = std::move(result.loss);
    } else {
      flight.sent = hand_over(step, output.detach());
    }
    if (options_.forward_only) {
      sending_.push_back(std::move(flight.sent));
      return;
    }
    if (output.defined()) flight.output = torch::autograd::impl::gradient_edge(output);
    flights_[{step.chunk, step.micro_batch}] = std::move(flight);
  }

  void backward(const PipelineStep& step, at::Tensor gradient) {
    auto flight = std::move(flights_.extract({step.chunk, step.micro_batch}).mapped());
    flight.sent.wait();  // it has come back since
    if (--backwards_left_[step.chunk] == 0 && pipeline_.ddp != nullptr)
      pipeline_.ddp->expect_last_backward(step.chunk);
    if (flight.loss.defined()) gradient = at::full_like(flight.loss, options_.grad_scale);
    require(flight.output.is_valid() && gradient.defined(), ErrorKind::kBug,
            "the loss of micro-batch {} cannot be propagated", step.micro_batch);
    torch::autograd::Engine::get_default_engine().execute(
        {flight.output}, {gradient}, /*keep_graph=*/false, /*create_graph=*/false,
        /*accumulate_grad=*/true);
    if (target(step) >= 0) sending_.push_back(hand_over(step, flight.input.grad()));
  }

  void forget_what_arrived() {
    std::erase_if(sending_, [](const Pending& pending) { return pending.done(); });
    for (auto& [place, flight] : flights_) {
      if (flight.sent.done()) flight.sent = {};
    }
  }

  const Pipeline& pipeline_;
  const models::ParallelState& mesh_;
  std::span<const models::SequencePartition> batches_;
  const LossFunction& loss_;
  const ForwardBackwardOptions& options_;
  std::vector<PipelineStep> steps_;
  // On a GPU a receive is a kernel that runs until its message comes. Loading the code of another
  // kernel (CUDA's lazy loading) waits for it: the message must not depend on what comes after.
  bool asks_early_;
  std::vector<std::size_t> backwards_left_;  // of each chunk
  std::vector<Arrival> arrivals_;            // of each step
  std::map<Place, Flight> flights_;
  std::map<Place, at::Tensor> handed_;  // between chunks of one stage
  std::vector<Pending> sending_;
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
  require(pipeline.chunks.size() == 1 || pipeline.p2p == nullptr ||
              !pipeline.chunks.front()->mesh().world().device().is_cuda(),
          ErrorKind::kUsage,
          "interleaved stages run on the host alone: on GPUs their messages were seen to wait for "
          "each other");
  std::optional<at::NoGradGuard> no_grad;
  if (options.forward_only) no_grad.emplace();
  return Run(pipeline, batches, loss, options).run();
}

}  // namespace ferry::trainer
