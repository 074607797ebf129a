#include "models/certificate/numerics_digest.h"

#include <gtest/gtest.h>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_training.h"

namespace ferry::models {
namespace numerics_digest_test {

NumericsPolicy policy(int tp, Alignment alignment, distckpt::DType dtype) {
  NumericsPolicy policy;
  const auto config = support::tiny_config({});
  run_ranks(tp, {}, [&](World& world) {
    const ParallelState mesh(
        world, {.tensor_model_parallel_size = tp, .make_vocab_size_divisible_by = 8}, "test");
    const GPTModel model(config, mesh, stage_chunks(config, mesh.shape().parallel(), 0)[0],
                         {.alignment = alignment, .dtype = dtype});
    if (world.rank() == 0) policy = numerics_policy(model);
  });
  return policy;
}

TEST(NumericsDigest, IsTheSameOnEveryMeshAndAnotherForAnotherDtype) {
  const auto one = policy(1, Alignment::kBitwise, distckpt::DType::kBF16);
  const auto two = policy(2, Alignment::kBitwise, distckpt::DType::kBF16);
  const auto wide = policy(1, Alignment::kBitwise, distckpt::DType::kF32);
  EXPECT_EQ(one.digest().size(), 32U);
  EXPECT_EQ(one.digest(), two.digest());
  EXPECT_NE(one.digest(), wide.digest());
  require_same_numerics(one, two);
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"dtype fp32 against dtype bf16"},
                             [&] { require_same_numerics(one, wide); }));
}

TEST(NumericsDigest, FastTrainersTakeWhatTheyGet) {
  const auto fast = policy(1, Alignment::kFast, distckpt::DType::kBF16);
  const auto bitwise = policy(1, Alignment::kBitwise, distckpt::DType::kBF16);
  require_same_numerics(fast, bitwise);
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"alignment fast against alignment bitwise"},
                             [&] { require_same_numerics(bitwise, fast); }));
}

}  // namespace numerics_digest_test
}  // namespace ferry::models
