// The output layer of some rows against that of all: the same log-probabilities, the same
// gradients.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "models/transformer/packed_sequences.h"
#include "tests/support/layout.h"
#include "tests/support/models/tiny_training.h"

namespace ferry::models {
namespace scored_rows_test {

using support::Layout;

std::vector<at::Tensor> gradients_of(const GPTModel& model, const at::Tensor& loss) {
  for (const auto& leaf : model.parameters().leaves()) leaf.value.mutable_grad() = at::Tensor();
  loss.backward();
  std::vector<at::Tensor> gradients;
  for (const auto& leaf : model.parameters().leaves())
    gradients.push_back(leaf.value.grad().clone());
  return gradients;
}

void expect_near(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_LE((got[i] - expected[i]).abs().max().item<float>(),
              1e-5 * expected[i].abs().max().item<float>())
        << i;
}

TEST(ScoredRows, HaveTheBytesOfAllAndTheirGradients) {
  const auto config = support::tiny_config({.family = "qwen2", .num_layers = 2});
  const auto sequences = support::random_sequences({7, 20, 5}, config.vocab_size, 1);
  at::manual_seed(3);
  const auto weights = at::randn({32});
  for (const auto& scored : {at::randn({32}) > 0.3, at::zeros({32}, at::kBool)}) {  // some; none
    for (const auto& layout :
         {Layout{"alone", 1, {}}, Layout{"tp2", 2, {.tensor_model_parallel_size = 2}, true},
          Layout{"cp2", 2, {.context_parallel_size = 2}}}) {
      SCOPED_TRACE(layout.name);
      run_ranks(layout.ranks, {}, [&](World& world) {
        auto parallel = layout.parallel;
        parallel.make_vocab_size_divisible_by = 2;
        const ParallelState mesh(world, parallel, "mesh");
        const auto chunks = make_stage(config, mesh,
                                       {.alignment = Alignment::kBitwise,
                                        .dtype = distckpt::DType::kF32,
                                        .sequence_parallel = layout.sequence_parallel});
        const auto& model = *chunks.front();
        support::fill_parameters(*chunks.front(), 5);
        auto packed = pack(sequences);
        packed.scored = scored;
        const SequencePartition batch(packed, mesh);
        const auto labels = batch.tokens_behind(1);
        const auto here = batch.local(scored);
        const auto weight = batch.local(weights) * here;
        EXPECT_EQ(batch.scored().size(0), here.sum().item<std::int64_t>());

        const auto all = model.log_probs(model.forward(batch), labels, 0.7);
        const auto some = model.log_probs(model.forward(batch), labels, 0.7, batch.scored());
        EXPECT_TRUE(at::equal(some.log_probs, at::where(here, all.log_probs, 0.0F)));
        EXPECT_TRUE(at::equal(some.entropy, at::where(here, all.entropy, 0.0F)));
        const auto loss = [&](const TokenLogProbs& of) {
          return (weight * (of.log_probs + 0.1 * of.entropy)).sum();
        };
        expect_near(gradients_of(model, loss(some)), gradients_of(model, loss(all)));

        const auto entropy_of_all = model.cross_entropy(model.forward(batch), labels, weight);
        const auto entropy_of_some =
            model.cross_entropy(model.forward(batch), labels, weight, batch.scored());
        EXPECT_TRUE(at::allclose(entropy_of_some.loss, entropy_of_all.loss));
        EXPECT_TRUE(
            at::equal(entropy_of_some.log_probs, at::where(here, entropy_of_all.log_probs, 0.0F)));
        expect_near(gradients_of(model, entropy_of_some.loss),
                    gradients_of(model, entropy_of_all.loss));
      });
    }
  }
}

}  // namespace scored_rows_test
}  // namespace ferry::models
