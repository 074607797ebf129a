#include "trainer/plan/pipeline_order.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

// Megatron's get_schedule_table: groups of micro-batches, in each chunk after chunk.
std::vector<PipelineStep> forward_steps(const PipelineShape& shape) {
  const auto group = shape.chunks == 1 ? 1 : shape.stages;
  std::vector<PipelineStep> steps;
  for (std::size_t first = 0; first < shape.micro_batches; first += group) {
    for (std::size_t chunk = 0; chunk < shape.chunks; ++chunk) {
      for (auto i = first; i < std::min(first + group, shape.micro_batches); ++i)
        steps.push_back({.chunk = chunk, .micro_batch = i});
    }
  }
  return steps;
}

// Forward passes before the first backward one, get_pp_rank_microbatches.
std::size_t num_warmup(const PipelineShape& shape) {
  const auto behind = shape.stages - shape.stage - 1;
  if (shape.chunks == 1) return behind;
  return 2 * behind + (shape.chunks - 1) * shape.stages;
}

// One stage: each micro-batch through all chunks and back.
std::vector<PipelineStep> without_pipelining(const std::vector<PipelineStep>& forward,
                                             std::size_t chunks) {
  std::vector<PipelineStep> steps;
  for (std::size_t first = 0; first < forward.size(); first += chunks) {
    for (std::size_t i = 0; i < chunks; ++i) steps.push_back(forward[first + i]);
    for (std::size_t i = chunks; i-- > 0;) {
      steps.push_back(forward[first + i]);
      steps.back().forward = false;
    }
  }
  return steps;
}

// The place of a pass along the whole pipeline, which goes round all stages once a chunk.
std::size_t place_of(const PipelineShape& shape, std::size_t stage, const PipelineStep& step) {
  return step.chunk * shape.stages + stage;
}

// All stages of a pipeline at once.
class Clockwork {
 public:
  explicit Clockwork(const PipelineShape& shape)
      : shape_(shape), last_(shape.stages * shape.chunks - 1), next_(shape.stages) {
    auto of_stage = shape;
    for (of_stage.stage = 0; of_stage.stage < shape.stages; ++of_stage.stage)
      orders_.push_back(pipeline_order(of_stage));
  }

  bool done() const {
    for (std::size_t stage = 0; stage < shape_.stages; ++stage) {
      if (next_[stage] < orders_[stage].size()) return false;
    }
    return true;
  }

  // One round: the pass of each stage, and what travels behind them.
  std::vector<std::optional<PipelineStep>> run(std::vector<PipelineTransfer>& transfers) {
    std::vector<std::optional<PipelineStep>> steps(shape_.stages);
    for (std::size_t stage = 0; stage < shape_.stages; ++stage) {
      if (next_[stage] == orders_[stage].size()) continue;
      const auto& step = orders_[stage][next_[stage]];
      if (!can_run(stage, step)) continue;
      steps[stage] = step;
      ++next_[stage];
    }
    for (std::size_t stage = 0; stage < shape_.stages; ++stage) {
      if (steps[stage]) hand_over(stage, *steps[stage], transfers);
    }
    return steps;
  }

 private:
  using Input = std::tuple<bool, std::size_t, std::size_t>;  // forward, place, micro-batch

  bool can_run(std::size_t stage, const PipelineStep& step) const {
    const auto place = place_of(shape_, stage, step);
    const bool begins = place == (step.forward ? 0 : last_);
    return begins || arrived_.contains({step.forward, place, step.micro_batch});
  }

  void hand_over(std::size_t stage,
                 const PipelineStep& step,
                 std::vector<PipelineTransfer>& transfers) {
    const auto place = place_of(shape_, stage, step);
    if (place == (step.forward ? last_ : 0)) return;
    const auto target = step.forward ? place + 1 : place - 1;
    arrived_.emplace(step.forward, target, step.micro_batch);
    const auto to = target % shape_.stages;
    if (to == stage) return;
    transfers.push_back({.forward = step.forward,
                         .chunk = target / shape_.stages,
                         .micro_batch = step.micro_batch,
                         .from = stage,
                         .to = to});
  }

  PipelineShape shape_;
  std::size_t last_;
  std::vector<std::vector<PipelineStep>> orders_;
  std::vector<std::size_t> next_;
  std::set<Input> arrived_;
};

}  // namespace

std::vector<PipelineStep> pipeline_order(const PipelineShape& shape) {
  const auto rest = shape.micro_batches % shape.stages;
  require(shape.chunks == 1 || rest == 0, ErrorKind::kUsage,
          "{} micro-batches in an interleaved pipeline are no multiple of its {} stages",
          shape.micro_batches, shape.stages);
  const auto forward = forward_steps(shape);
  if (shape.forward_only) return forward;
  if (shape.stages == 1) return without_pipelining(forward, shape.chunks);
  auto backward = forward;
  for (auto& step : backward) {
    step.forward = false;
    step.chunk = shape.chunks - 1 - step.chunk;
  }
  const auto warmup = std::min(num_warmup(shape), forward.size());
  std::vector<PipelineStep> steps(forward.begin(),
                                  forward.begin() + static_cast<std::ptrdiff_t>(warmup));
  for (auto i = warmup; i < forward.size(); ++i) {
    steps.push_back(forward[i]);
    steps.push_back(backward[i - warmup]);
  }
  for (auto i = forward.size() - warmup; i < backward.size(); ++i) steps.push_back(backward[i]);
  return steps;
}

std::vector<PipelineRound> pipeline_rounds(const PipelineShape& shape) {
  std::vector<PipelineRound> rounds;
  Clockwork clockwork(shape);
  for (std::size_t number = 0; !clockwork.done(); ++number) {
    std::vector<PipelineTransfer> transfers;
    const auto steps = clockwork.run(transfers);
    require(std::ranges::any_of(steps, [](const auto& step) { return step.has_value(); }),
            ErrorKind::kBug, "the stages of a pipeline wait for each other");
    std::erase_if(transfers, [&](const PipelineTransfer& transfer) {
      return transfer.from != shape.stage && transfer.to != shape.stage;
    });
    if (steps[shape.stage] || !transfers.empty())
      rounds.push_back({.number = number, .step = steps[shape.stage], .transfers = transfers});
  }
  return rounds;
}

}  // namespace ferry::trainer
