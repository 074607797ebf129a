#include "trainer/update/compute_values.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/expect.h"
#include "tests/support/layout.h"
#include "tests/support/models/tiny_training.h"
#include "trainer/engine/micro_batches.h"

namespace ferry::trainer {
namespace compute_values_test {

using support::kLayouts;
using support::Layout;

const std::vector<std::int64_t> kLengths{7, 20, 1, 33, 12, 16, 2, 9};

struct Scores {
  std::vector<at::Tensor> values{};
  at::Tensor rm_scores{};
};

Scores run(models::World& world,
           const Layout& layout,
           const std::string& head,
           const std::vector<at::Tensor>& all,
           std::size_t micro_batch) {
  auto parallel = layout.parallel;
  parallel.make_vocab_size_divisible_by = 2;
  const models::ParallelState mesh(world, parallel, "mesh");
  const auto config = support::tiny_config({.family = "qwen2", .num_layers = 4, .head = head});
  const auto chunks = models::make_stage(
      config, mesh,
      {.alignment = models::Alignment::kBitwise, .sequence_parallel = layout.sequence_parallel});
  std::vector<models::GPTModel*> pointers;
  for (const auto& chunk : chunks) {
    support::fill_parameters(*chunk, 5);
    pointers.push_back(chunk.get());
  }
  const P2PCommunicator p2p(world, mesh, "p2p", chunks.size() > 1);
  const Pipeline pipeline{.chunks = pointers, .p2p = &p2p};
  std::vector<at::Tensor> mine;
  for (auto i = static_cast<std::size_t>(mesh.coordinates().dp); i < all.size();
       i += static_cast<std::size_t>(mesh.shape().dp()))
    mine.push_back(all[i]);
  const auto parts = split_micro_batches(mine.size(), micro_batch);
  Scores scores{.rm_scores = compute_rm_score(pipeline, mine, parts)};
  if (head == "Token") scores.values = compute_values(pipeline, mine, parts);
  return scores;
}

void expect_same_on_all_meshes(const std::string& head) {
  const auto sequences = support::random_sequences(kLengths, 50, 1);
  models::World alone({});
  const auto expected = run(alone, kLayouts[0], head, sequences, 1);
  ASSERT_EQ(expected.rm_scores.sizes(), at::IntArrayRef({8}));
  EXPECT_GT(expected.rm_scores.std().item<float>(), 0.01);
  for (const auto& layout : kLayouts) {
    for (const std::size_t micro_batch : {1, 4}) {
      SCOPED_TRACE(fmt::format("{} {}", layout.name, micro_batch));
      models::run_ranks(layout.ranks, {}, [&](models::World& world) {
        const auto dp = layout.parallel.context_parallel_size == 2 ? 2 : 1;
        const auto first = dp == 2 ? world.rank() / 2 : 0;
        const auto got = run(world, layout, head, sequences, micro_batch);
        EXPECT_TRUE(at::equal(got.rm_scores, expected.rm_scores.slice(0, first, std::nullopt, dp)));
        for (std::size_t i = 0; i < got.values.size(); ++i) {
          const auto& one =
              expected.values[static_cast<std::size_t>(first) + i * static_cast<std::size_t>(dp)];
          EXPECT_TRUE(at::equal(got.values[i], one)) << i;
        }
      });
    }
  }
}

TEST(ComputeValues, DoNotDependOnTheMeshNorOnTheMicroBatches) {
  expect_same_on_all_meshes("Token");
}

TEST(ComputeRmScore, DoesNotDependOnTheMeshNorOnTheMicroBatches) {
  expect_same_on_all_meshes("Sequence");
}

TEST(ComputeRmScore, IsTheValueOfTheLastToken) {
  const auto sequences = support::random_sequences(kLengths, 50, 1);
  models::World alone({});
  const auto got = run(alone, kLayouts[0], "Token", sequences, 3);
  ASSERT_EQ(got.values.size(), sequences.size());
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    EXPECT_EQ(got.values[i].sizes(), sequences[i].sizes());
    EXPECT_EQ(got.values[i].scalar_type(), at::kFloat);
    EXPECT_EQ(got.values[i][-1].item<float>(),
              got.rm_scores[static_cast<std::int64_t>(i)].item<float>());
  }
}

TEST(ComputeValues, RefuseAModelWithoutAValueHead) {
  models::World alone({});
  const models::ParallelState mesh(alone, {}, "mesh");
  const auto sequences = support::random_sequences({3}, 50, 1);
  const auto refused = [&](const support::TinyModel& tiny, auto&& compute) {
    const auto chunks = models::make_stage(support::tiny_config(tiny), mesh, {});
    const Pipeline pipeline{.chunks = {chunks.front().get()}};
    return support::fails(ErrorKind::kUsage, {"head of one label"},
                          [&] { compute(pipeline, sequences, split_micro_batches(1, 1)); });
  };
  const auto values = [](const auto&... all) { return compute_values(all...); };
  EXPECT_TRUE(refused({}, values));
  EXPECT_TRUE(refused({.head = "Sequence"}, values));
  EXPECT_TRUE(refused({.head = "Token", .labels = 2}, values));
  const auto score = [](const auto&... all) { return compute_rm_score(all...); };
  EXPECT_TRUE(refused({}, score));
  EXPECT_TRUE(refused({.head = "Sequence", .labels = 2}, score));
}

}  // namespace compute_values_test
}  // namespace ferry::trainer
