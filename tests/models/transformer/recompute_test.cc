// A model that computes its activations again has the gradients of one that keeps them, to the bit.
#include "models/transformer/recompute.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/files.h"
#include "tests/support/models/backward.h"
#include "tests/support/models/naive_load.h"

namespace ferry::models {
namespace recompute_test {

struct Result {
  at::Tensor hidden;
  std::vector<at::Tensor> gradients;
  bool operator==(const Result& other) const {
    if (!hidden.equal(other.hidden) || gradients.size() != other.gradients.size()) return false;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].equal(other.gradients[i])) return false;
    }
    return true;
  }
};

// The result of rank 0.
Result run(const std::filesystem::path& folder, int tp, int cp, const Recompute& recompute) {
  Result result;
  at::manual_seed(3);
  const auto sequences =
      pack({at::randint(200, {24}, at::kLong), at::randint(200, {40}, at::kLong)});
  run_ranks(tp * cp, {}, [&](World& world) {
    const ParallelState mesh(world, {.tensor_model_parallel_size = tp, .context_parallel_size = cp},
                             "test");
    const auto chunks = make_stage(
        support::read_config(folder), mesh,
        {.alignment = Alignment::kBitwise, .sequence_parallel = tp > 1, .recompute = recompute});
    auto& model = *chunks.front();
    support::naive_load(model, folder);
    const SequencePartition batch(sequences, mesh);
    const auto hidden = model.forward(batch);
    hidden.to(at::kFloat).square().sum().backward();
    finalize_model_grads({&model});
    if (world.rank() != 0) return;
    result.hidden = hidden.detach();
    for (std::size_t i = 0; i < model.parameters().all().size(); ++i) {
      if (const auto gradient = model.parameters().gradient(i); gradient.defined())
        result.gradients.push_back(gradient.clone());
    }
  });
  return result;
}

std::filesystem::path model(const std::string& name) {
  return support::test_data("hf_" + name) / "hf";
}

using Granularity = Recompute::Granularity;
using Method = Recompute::Method;

TEST(Recompute, GradientsHaveTheSameBits) {
  for (const std::string name : {"llama", "qwen3_moe", "deepseek_v3"})
    for (const auto& [tp, cp] : {std::pair{1, 1}, {2, 1}, {1, 2}}) {
      const auto kept = run(model(name), tp, cp, {});
      for (const auto& recompute :
           {Recompute{
                .granularity = Granularity::kFull, .method = Method::kUniform, .num_layers = 1},
            Recompute{
                .granularity = Granularity::kFull, .method = Method::kUniform, .num_layers = 3},
            Recompute{.granularity = Granularity::kFull, .method = Method::kBlock, .num_layers = 2},
            Recompute{.granularity = Granularity::kSelective,
            .modules = {.core_attn = true, .mlp = true, .moe = true}},
            Recompute{.granularity = Granularity::kSelective, .modules = {.moe_act = true}},
            Recompute{.granularity = Granularity::kSelective,
            .modules = {.moe = true, .moe_act = true}}}) {
        EXPECT_TRUE(run(model(name), tp, cp, recompute) == kept)
            << name << ", tp " << tp << ", cp " << cp << ", granularity "
            << static_cast<int>(recompute.granularity) << ", layers " << recompute.num_layers;
      }
    }
}

TEST(Recompute, KeepsTheInputsAloneAndComputesTwice) {
  int calls = 0;
  const Computation square = [&](const std::vector<at::Tensor>& inputs) {
    ++calls;
    return std::vector{inputs[0] * inputs[0], inputs[0] + inputs[1]};
  };
  const auto x = at::arange(4, at::kFloat).requires_grad_();
  const auto y = at::ones({4});
  const auto outputs = recompute(square, {x, y});
  EXPECT_EQ(calls, 1);
  outputs[0].sum().backward();  // nothing comes back to the second output
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(at::equal(x.grad(), 2 * x.detach()));
  const at::NoGradGuard no_grad;
  (void)recompute(square, {x, y});
  EXPECT_EQ(calls, 3);
}

TEST(Recompute, GivesAnOutputBackUntilItsUsersGradientComes) {
  const auto x = at::arange(1, 5, at::kFloat).requires_grad_();
  const auto factors = at::ones({4}).requires_grad_();
  int calls = 0;
  const auto twice = [&] {
    ++calls;
    return x * 2;
  };
  const auto output = twice();
  const auto user = output * factors;
  discard_output(output, user, twice);
  EXPECT_EQ(output.storage().nbytes(), 0U);
  user.sum().backward();
  EXPECT_EQ(calls, 2);
  EXPECT_TRUE(at::equal(factors.grad(), 2 * x.detach()));
  EXPECT_TRUE(at::equal(x.grad(), at::full({4}, 2.0F)));
}

}  // namespace recompute_test
}  // namespace ferry::models
