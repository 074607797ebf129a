#include "trainer/replicas/weight_image.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "models/gpt_model.h"
#include "tests/support/expect.h"
#include "tests/support/models/tiny_training.h"

namespace ferry::trainer {
namespace weight_image_test {

class WeightImageTest : public testing::Test {
 protected:
  using Model = std::unique_ptr<models::GPTModel>;

  Model model(std::uint64_t seed, const support::TinyModel& shape = {}) {
    const auto config = support::tiny_config(shape);
    auto made = std::make_unique<models::GPTModel>(
        config, mesh_, models::stage_chunks(config, {}, 0)[0],
        models::ModelOptions{.alignment = models::Alignment::kBitwise});
    support::fill_parameters(*made, seed);
    return made;
  }

  // The first key that differs.
  static std::string difference(const Model& left, const Model& right) {
    support::WholeTensors of_left, of_right;
    for (const auto& shard : left->sharded_state_dict()) of_left.add(shard);
    for (const auto& shard : right->sharded_state_dict()) of_right.add(shard);
    return support::first_difference(of_left, of_right, 0);
  }

  models::World world_{{}};
  models::ParallelState mesh_{world_, {}, "test"};
};

TEST_F(WeightImageTest, BringsEveryBit) {
  const auto from = model(1), to = model(2);
  ASSERT_NE(difference(from, to), "");
  const WeightImage image(*from, /*digests=*/true);
  EXPECT_FALSE(image.packet().at("digests").empty());
  read_weights(image.packet(), image.memory(), *to);
  EXPECT_EQ(difference(from, to), "");
}

TEST_F(WeightImageTest, BringsExpertsToo) {
  const support::TinyModel shape{.family = "mixtral"};
  const auto from = model(1, shape), to = model(2, shape);
  const WeightImage image(*from, /*digests=*/false);
  read_weights(image.packet(), image.memory(), *to);
  EXPECT_EQ(difference(from, to), "");
}

TEST_F(WeightImageTest, BringsTensorsInPieces) {
  const auto from = model(1), to = model(2);
  const WeightImage whole(*from, /*digests=*/true), image(*from, /*digests=*/true, 1000);
  EXPECT_GT(image.packet().at("digests").size(), whole.packet().at("digests").size());
  read_weights(image.packet(), image.memory(), *to);
  EXPECT_EQ(difference(from, to), "");
}

TEST_F(WeightImageTest, KeepsTheWeightsThatItWasMadeOf) {
  const auto from = model(1), to = model(2), same = model(1);
  const WeightImage image(*from, /*digests=*/false);
  support::fill_parameters(*from, 3);
  read_weights(image.packet(), image.memory(), *to);
  EXPECT_EQ(difference(same, to), "");
}

TEST_F(WeightImageTest, CannotBeWritten) {
  const auto from = model(1);
  const WeightImage image(*from, /*digests=*/false);
  const auto memory = image.memory();
  EXPECT_EQ(pwrite(memory.get(), "x", 1, 0), -1);
  EXPECT_EQ(ftruncate(memory.get(), 0), -1);
  EXPECT_EQ(mmap(nullptr, 1, PROT_READ | PROT_WRITE, MAP_SHARED, memory.get(), 0), MAP_FAILED);
}

TEST_F(WeightImageTest, RefusesAnotherModel) {
  const auto from = model(1), wider = model(1, {.ffn = 160}), deeper = model(1, {.num_layers = 3});
  const WeightImage image(*from, /*digests=*/false);
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"mlp.linear_fc1.weight", "where the model has"},
                             [&] { read_weights(image.packet(), image.memory(), *wider); }));
  EXPECT_TRUE(support::fails(ErrorKind::kLayout, {"tensors, where the model has"},
                             [&] { read_weights(image.packet(), image.memory(), *deeper); }));
}

TEST_F(WeightImageTest, RefusesOtherBytes) {
  const auto from = model(1), to = model(2);
  const WeightImage image(*from, /*digests=*/true), other(*to, /*digests=*/false);
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"the digests of what was sent and of what came"},
                             [&] { read_weights(image.packet(), other.memory(), *to); }));
}

TEST_F(WeightImageTest, RefusesMemoryOfAnotherSize) {
  const auto from = model(1), to = model(2);
  const WeightImage image(*from, /*digests=*/false);
  const distckpt::Descriptor empty(memfd_create("test", MFD_CLOEXEC));
  EXPECT_TRUE(support::fails(ErrorKind::kCorrupt, {"ends at byte 0"},
                             [&] { read_weights(image.packet(), empty, *to); }));
}

}  // namespace weight_image_test
}  // namespace ferry::trainer
