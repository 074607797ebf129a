#include "trainer/engine/pipeline/pipeline_schedule.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/models/tiny_training.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/plan/pipeline_order.h"

namespace ferry::trainer {
namespace pipeline_schedule_test {

using models::GPTModel;
using models::ParallelConfig;
using support::WholeTensors;

std::string text_of(const PipelineShape& shape) {
  std::string text;
  for (const auto& step : pipeline_order(shape)) {
    if (!text.empty()) text += ' ';
    text += fmt::format("{}{}", step.forward ? 'F' : 'B', step.micro_batch);
    if (shape.chunks > 1) text += fmt::format(".{}", step.chunk);
  }
  return text;
}

// tests/interop/train/test_trainer.py holds the lists to Megatron-Core's own functions.
TEST(PipelineOrder, IsOneForwardOneBackward) {
  EXPECT_EQ(text_of({.micro_batches = 2}), "F0 B0 F1 B1");
  EXPECT_EQ(text_of({.stages = 2, .stage = 0, .micro_batches = 4}), "F0 F1 B0 F2 B1 F3 B2 B3");
  EXPECT_EQ(text_of({.stages = 2, .stage = 1, .micro_batches = 4}), "F0 B0 F1 B1 F2 B2 F3 B3");
  EXPECT_EQ(text_of({.stages = 4, .stage = 0, .micro_batches = 2}), "F0 F1 B0 B1");
  EXPECT_EQ(text_of({.stages = 4, .stage = 1, .micro_batches = 3, .forward_only = true}),
            "F0 F1 F2");
}

TEST(PipelineOrder, Interleaves) {
  EXPECT_EQ(text_of({.stages = 1, .chunks = 2, .micro_batches = 2}),
            "F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 B1.1 B1.0");
  EXPECT_EQ(text_of({.stages = 2, .stage = 1, .chunks = 2, .micro_batches = 2}),
            "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0");
  EXPECT_EQ(text_of({.stages = 2, .stage = 0, .chunks = 2, .micro_batches = 4}),
            "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0");
  EXPECT_THROW(pipeline_order({.stages = 2, .chunks = 2, .micro_batches = 3}), Error);
}

// Runs the rounds of all stages where every message blocks both sides until it is over, as kernels
// that wait for each other may. Fails where stages wait for each other for ever, a pass lacks what
// it takes or comes before its forward pass, or a message comes twice.
void expect_runs(std::size_t stages,
                 std::size_t chunks,
                 std::size_t micro_batches,
                 bool forward_only) {
  std::vector<std::vector<PipelineRound>> rounds;
  std::vector<std::vector<PipelineStep>> passes(stages);
  for (std::size_t stage = 0; stage < stages; ++stage) {
    const PipelineShape shape{stages, stage, chunks, micro_batches, forward_only};
    rounds.push_back(pipeline_rounds(shape));
    for (const auto& round : rounds.back()) {
      if (round.step) passes[stage].push_back(*round.step);
    }
    ASSERT_EQ(passes[stage], pipeline_order(shape));
  }
  const auto last = stages * chunks - 1;
  std::vector<std::set<std::tuple<bool, std::size_t, std::size_t>>> inbox(
      stages);  // forward, chunk, micro-batch
  std::vector<std::size_t> at(stages);
  std::vector<bool> computed(stages);  // this round's pass
  std::vector<std::vector<std::size_t>> backward_of(stages * chunks);
  std::set<std::pair<std::size_t, std::size_t>> in_flight;
  const auto compute = [&](std::size_t stage, const PipelineStep& step) {
    const auto place = step.chunk * stages + stage;
    if (step.forward ? place > 0 : place < last) {
      ASSERT_EQ(inbox[stage].erase({step.forward, step.chunk, step.micro_batch}), 1U) << stage;
    }
    if (stages == 1 && (step.forward ? place < last : place > 0))
      inbox[stage].emplace(step.forward, step.forward ? step.chunk + 1 : step.chunk - 1,
                           step.micro_batch);
    if (step.forward) {
      ASSERT_TRUE(in_flight.emplace(place, step.micro_batch).second);
    } else {
      ASSERT_EQ(in_flight.erase({place, step.micro_batch}), 1U) << stage;
      backward_of[place].push_back(step.micro_batch);
    }
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t stage = 0; stage < stages; ++stage) {
      if (at[stage] == rounds[stage].size()) continue;
      const auto& round = rounds[stage][at[stage]];
      if (round.step && !computed[stage]) {
        compute(stage, *round.step);
        if (::testing::Test::HasFatalFailure()) return;
      }
      computed[stage] = true;
      bool all_met = true;
      for (const auto& transfer : round.transfers) {
        const auto other = transfer.from == stage ? transfer.to : transfer.from;
        const bool met = at[other] < rounds[other].size() &&
                         rounds[other][at[other]].number == round.number && computed[other];
        const bool passed =
            at[other] == rounds[other].size() || rounds[other][at[other]].number > round.number;
        all_met = all_met && (met || passed);
      }
      if (!all_met) continue;
      for (const auto& transfer : round.transfers) {
        const bool arrives =
            transfer.to != stage ||
            inbox[stage].emplace(transfer.forward, transfer.chunk, transfer.micro_batch).second;
        ASSERT_TRUE(arrives);
      }
      ++at[stage];
      computed[stage] = false;
      moved = true;
    }
  }
  for (std::size_t stage = 0; stage < stages; ++stage)
    EXPECT_EQ(at[stage], rounds[stage].size()) << stage;
  for (const auto& order : backward_of) {
    EXPECT_EQ(order.size(), forward_only ? 0 : micro_batches);
    EXPECT_TRUE(std::ranges::is_sorted(order));
  }
}

TEST(PipelineOrder, NamesEachMessageOnBothSidesInOneOrder) {
  for (const std::size_t stages : {2, 3, 4}) {
    for (const std::size_t chunks : {1, 2}) {
      std::vector<std::map<std::size_t, std::vector<PipelineTransfer>>> of_round(stages);
      for (std::size_t stage = 0; stage < stages; ++stage) {
        for (const auto& round : pipeline_rounds({stages, stage, chunks, 2 * stages}))
          of_round[stage][round.number] = round.transfers;
      }
      std::size_t messages = 0;
      for (std::size_t a = 0; a < stages; ++a) {
        for (std::size_t b = 0; b < stages; ++b) {
          if (a == b) continue;
          for (const auto& [number, transfers] : of_round[a]) {
            const auto between = [&](std::size_t stage) {
              auto these = of_round[stage][number];
              std::erase_if(these, [&](const PipelineTransfer& t) {
                return !(t.from == a && t.to == b) && !(t.from == b && t.to == a);
              });
              return these;
            };
            EXPECT_EQ(between(a), between(b));
            messages += between(a).size();
          }
        }
      }
      // Two of each micro-batch between neighbouring places, each counted from both sides.
      EXPECT_EQ(messages, 2 * 2 * 2 * stages * (stages * chunks - 1));
    }
  }
}

TEST(PipelineOrder, NeverWaitsForEver) {
  for (const bool forward_only : {false, true}) {
    for (std::size_t stages = 1; stages <= 6; ++stages) {
      for (std::size_t chunks = 1; chunks <= 4; ++chunks) {
        for (std::size_t micro_batches = 1; micro_batches <= 13; ++micro_batches) {
          if (chunks > 1 && micro_batches % stages != 0) continue;
          SCOPED_TRACE(
              fmt::format("{} stages, {} chunks, {} micro-batches", stages, chunks, micro_batches));
          expect_runs(stages, chunks, micro_batches, forward_only);
        }
      }
    }
  }
}

struct Layout {
  std::string name{};
  int ranks = 1;
  ParallelConfig parallel{};
};

struct Outcome {
  WholeTensors gradients{};
  std::vector<float> losses{};
};

constexpr std::size_t kMicroBatches = 4;

void run_rank(const Layout& layout,
              const support::TinyModel& tiny,
              models::ModelOptions options,
              bool forward_only,
              models::World& world,
              Outcome& outcome) {
  auto parallel = layout.parallel;
  parallel.make_vocab_size_divisible_by = 2;
  const models::ParallelState mesh(world, parallel, "mesh");
  const auto config = support::tiny_config(tiny);
  const auto chunks = models::make_stage(config, mesh, options);
  std::vector<GPTModel*> pointers;
  for (const auto& chunk : chunks) {
    support::fill_parameters(*chunk, 5);
    pointers.push_back(chunk.get());
  }
  DistributedDataParallel ddp(pointers, {.bucket_size = 500});
  const P2PCommunicator p2p(world, mesh, "p2p", chunks.size() > 1);
  // Packs of other lengths each.
  const auto sequences = support::random_sequences({8, 12, 16, 4, 20, 8, 4}, config.vocab_size, 9);
  const auto batches = pack_micro_batches(sequences, {{0, 1}, {2}, {3, 4, 5}, {6}}, mesh);
  const LossFunction loss = [&](const GPTModel& model, const at::Tensor& hidden, std::size_t i) {
    const auto value = support::token_loss(model, hidden, batches[i], 72.0);
    return LossOutput{.loss = forward_only ? at::Tensor() : value,
                      .metrics = {{"loss", value.detach()}}};
  };
  ddp.zero_grad();
  const auto metrics = forward_backward({.chunks = pointers, .p2p = &p2p, .ddp = &ddp}, batches,
                                        loss, {.forward_only = forward_only});
  const bool last = mesh.is_last_stage();
  EXPECT_EQ(metrics.size(), last ? kMicroBatches : 0) << layout.name;
  if (!forward_only) {
    ddp.finish_grad_sync();
    for (auto& buffer : ddp.buffers()) {
      for (const auto& bucket : buffer.buckets()) {
        for (const auto& slot : bucket.slots()) {
          const auto& leaf = buffer.parameters().leaves()[slot.leaf];
          for (std::size_t i = 0; i < leaf.parameters.size(); ++i) {
            const auto gradient = buffer.main_grad(slot);
            const auto& spec = buffer.parameters().all()[leaf.parameters[i]].spec;
            outcome.gradients.add(spec, gradient.dim() == spec.shape.rank()
                                            ? gradient
                                            : gradient.select(0, static_cast<std::int64_t>(i)));
          }
        }
      }
    }
  }
  if (last && mesh.coordinates().tp == 0) {
    static std::mutex mutex;
    const std::lock_guard lock(mutex);
    for (const auto& metric : metrics) outcome.losses.push_back(metric.at("loss").item<float>());
  }
}

std::unique_ptr<Outcome> run(const Layout& layout,
                             const support::TinyModel& tiny,
                             models::ModelOptions options,
                             bool forward_only = false) {
  auto outcome = std::make_unique<Outcome>();
  models::run_ranks(layout.ranks, {.timeout = std::chrono::seconds(60)}, [&](models::World& world) {
    run_rank(layout, tiny, options, forward_only, world, *outcome);
  });
  return outcome;
}

std::vector<Layout> layouts() {
  return {
      {"alone", 1, {}},
      {"alone in two chunks", 1, {.pipeline_model_parallel_layout = "Ettt|tttttL"}},
      {"pp2", 2, {.pipeline_model_parallel_size = 2}},
      {"pp2 uneven",
       2,
       {.pipeline_model_parallel_size = 2, .num_layers_in_first_pipeline_stage = 3}},
      {"pp2 vpp2",
       2,
       {.pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 2}},
      {"pp4", 4, {.pipeline_model_parallel_size = 4}},
      {"pp4 vpp2",
       4,
       {.pipeline_model_parallel_size = 4, .virtual_pipeline_model_parallel_size = 2}},
      {"pp2 vpp3 uneven, one chunk empty",
       2,
       {.pipeline_model_parallel_size = 2, .pipeline_model_parallel_layout = "Et|ttt||tt|t|tL"}},
      {"pp4, embedding and loss alone",
       4,
       {.pipeline_model_parallel_size = 4, .pipeline_model_parallel_layout = "E|tttt|tttt|L"}}};
}

TEST(PipelineSchedule, GivesTheSameGradientsBitForBitOnEveryPipeline) {
  const support::TinyModel tiny{.family = "qwen3", .num_layers = 8};
  for (const auto dtype : {distckpt::DType::kBF16, distckpt::DType::kF32}) {
    const auto expected = run(layouts()[0], tiny, {.dtype = dtype});
    ASSERT_EQ(expected->losses.size(), kMicroBatches);
    for (const auto& layout : layouts()) {
      const auto got = run(layout, tiny, {.dtype = dtype});
      EXPECT_EQ(support::first_difference(got->gradients, expected->gradients, 0), "")
          << layout.name;
      EXPECT_EQ(got->losses, expected->losses) << layout.name;
    }
  }
}

TEST(PipelineSchedule, CarriesTensorParallelStagesWithSharedSequences) {
  const support::TinyModel tiny{.family = "llama", .num_layers = 4};
  const models::ModelOptions options{.dtype = distckpt::DType::kF32, .sequence_parallel = true};
  const auto expected = run({"tp2", 2, {.tensor_model_parallel_size = 2}}, tiny, options);
  const auto got = run({"tp2 pp2 vpp2",
                        4,
                        {.tensor_model_parallel_size = 2,
                         .pipeline_model_parallel_size = 2,
                         .virtual_pipeline_model_parallel_size = 2}},
                       tiny, options);
  EXPECT_EQ(support::first_difference(got->gradients, expected->gradients, 0), "");
  EXPECT_EQ(got->losses, expected->losses);
}

TEST(PipelineSchedule, RunsForwardsOnly) {
  const support::TinyModel tiny{.family = "llama", .num_layers = 8};
  const models::ModelOptions options{.dtype = distckpt::DType::kF32};
  const auto expected = run(layouts()[0], tiny, options);
  for (const auto& layout : {layouts()[0], layouts()[2], layouts()[6]})
    EXPECT_EQ(run(layout, tiny, options, /*forward_only=*/true)->losses, expected->losses)
        << layout.name;
}

// The cut into micro-batches changes sums by their rounding alone: the loss is normalised by a
// count of the whole batch.
TEST(PipelineSchedule, GradientsDoNotDependOnTheCutIntoMicroBatches) {
  models::run_ranks(1, {}, [](models::World& world) {
    const models::ParallelState mesh(world, {.make_vocab_size_divisible_by = 2}, "mesh");
    const auto config = support::tiny_config({.family = "llama"});
    const auto sequences = support::random_sequences({8, 3, 16, 5}, config.vocab_size, 9);
    WholeTensors whole;
    for (const auto& parts :
         {std::vector<Partition>{{0, 1, 2, 3}}, {{0}, {1}, {2}, {3}}, {{3, 0}, {2, 1}}}) {
      const auto chunks = models::make_stage(config, mesh, {.dtype = distckpt::DType::kF32});
      support::fill_parameters(*chunks[0], 5);
      const auto batches = pack_micro_batches(sequences, parts, mesh);
      (void)forward_backward(
          {.chunks = {chunks[0].get()}}, batches,
          [&](const GPTModel& model, const at::Tensor& hidden, std::size_t i) {
            return LossOutput{.loss = support::token_loss(model, hidden, batches[i], 32.0)};
          },
          {.grad_scale = 4});
      WholeTensors got;
      const auto& parameters = chunks[0]->parameters();
      for (std::size_t i = 0; i < parameters.all().size(); ++i) {
        const auto gradient = parameters.gradient(i);
        got.add(parameters.all()[i].spec, gradient);
        if (parts.size() == 1) whole.add(parameters.all()[i].spec, gradient);
      }
      EXPECT_EQ(support::first_difference(got, whole, 1e-5), "") << parts.size();
    }
  });
}

}  // namespace pipeline_schedule_test
}  // namespace ferry::trainer
