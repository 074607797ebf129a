#include "trainer/run/config_agreement.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "tests/support/expect.h"
#include "trainer/config/sft_config.h"

namespace ferry::trainer {
namespace config_agreement_test {

using support::fails;

// Calls `on_rank` with the comparison, on a rank for each list of overrides.
void compare(const std::vector<std::vector<std::string>>& of_ranks,
             const std::function<void(const std::function<void()>&)>& on_rank) {
  std::vector<ConfigValues> values;
  for (auto overrides : of_ranks) {
    overrides.insert(overrides.end(), {"model.path=m", "data.train_files=f"});
    values.push_back(values_of(load_sft_config({}, overrides)));
  }
  models::run_ranks(
      static_cast<int>(values.size()), {.timeout = std::chrono::seconds(60)},
      [&](models::World& world) {
        on_rank([&] { require_agreement(values[static_cast<std::size_t>(world.rank())], world); });
      });
}

TEST(ConfigAgreement, NamesTheFirstKeyThatDiffersOnEveryRank) {
  compare({{"optim.lr=1e-6", "trainer.seed=3"}, {"trainer.seed=4"}, {"optim.lr=1e-6"}},
          [](const std::function<void()>& check) {
            EXPECT_TRUE(fails(ErrorKind::kUsage,
                              {"optim.lr is 1e-06 on ranks 0, 2, 1e-05 on rank 1", "the same file"},
                              check));
          });
  compare({{}, {"data.max_token_len_per_gpu=2048"}}, [](const std::function<void()>& check) {
    EXPECT_TRUE(fails(ErrorKind::kUsage,
                      {"data.max_token_len_per_gpu is \"auto\" on rank 0, 2048 on rank 1"}, check));
  });
}

TEST(ConfigAgreement, TakesTheSameValuesHoweverTheyWereSet) {
  compare({{"optim.lr=1e-5"}, {}}, [](const std::function<void()>& check) { check(); });
}

}  // namespace config_agreement_test
}  // namespace ferry::trainer
