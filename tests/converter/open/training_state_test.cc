#include "converter/open/training_state.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "converter/open/checkpoint.h"
#include "tests/support/files.h"

namespace ferry::converter {
namespace training_state_test {

Checkpoint open_with_state(std::string_view name) {
  return open(support::test_data(name),
              {.hf_config = support::test_data("hf_llama") / "hf", .training_state = true});
}

TEST(TrainingState, IsThereIfItWasSaved) {
  EXPECT_TRUE(has_optimizer(open_with_state("llama_optim_full")));
  EXPECT_FALSE(has_optimizer(open_with_state("llama_tp1")));
  EXPECT_FALSE(open_with_state("llama_tp1").training.has_value());
}

TEST(TrainingState, OfEveryFormHasMastersAndMoments) {
  for (const auto* name : {"llama_optim_full", "llama_optim_dp", "llama_optim_zero"}) {
    const auto checkpoint = open_with_state(name);
    ASSERT_TRUE(checkpoint.training.has_value()) << name;
    EXPECT_EQ(checkpoint.training->optimizer.kinds,
              (std::vector<std::string>{"exp_avg", "exp_avg_sq", "param"}))
        << name;
  }
}

TEST(TrainingState, AddsTheOptimizersTensorsBehindTheModels) {
  const auto checkpoint = open_with_state("llama_optim_full");
  const auto& tensors = checkpoint.tensors;
  const auto first = checkpoint.training->first_tensor;
  const auto is_state = [](const auto& tensor) { return tensor.role == distckpt::Role::kState; };
  EXPECT_TRUE(std::none_of(tensors.begin(), tensors.begin() + first, is_state));
  EXPECT_TRUE(std::all_of(tensors.begin() + first, tensors.end(), is_state));
  EXPECT_EQ(tensors.size() - first, 3 * checkpoint.map.megatron.size());
}

}  // namespace training_state_test
}  // namespace ferry::converter
