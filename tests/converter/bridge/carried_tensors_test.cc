#include "converter/bridge/carried_tensors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "distckpt/execute/memory_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"

namespace ferry::converter {
namespace carried_tensors_test {

using distckpt::Region;

// A model of one tensor of four bytes in memory, which is saved beside the tower of Qwen3-VL.
class CarriedTensorsTest : public testing::Test {
 protected:
  CarriedTensorsTest() {
    const auto storage =
        model_.layout.add_storage(distckpt::MemoryStorage{.data = bytes_.data(), .size = 4});
    const distckpt::Shape shape{2};
    model_.tensors.push_back({.name = "own", .shape = shape});
    model_.layout.add_tensor(
        {.name = "own",
         .shape = shape,
         .shards = {distckpt::packed_shard(distckpt::Box::whole(shape), distckpt::DType::kBF16,
                                           storage, 0)}});
    model_.links.links.push_back(distckpt::BoxLink::whole(0, 0, shape));
  }

  std::int64_t num_carried() const {
    return std::ranges::count_if(
        origin_.tensors, [&](const auto& tensor) { return origin_.map.is_carried(tensor.name); });
  }

  Checkpoint origin_ = open(support::test_data("hf_qwen3_vl") / "hf");
  std::vector<std::byte> bytes_{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}};
  Checkpoint model_;
};

TEST_F(CarriedTensorsTest, AddsTheTowerBehindTheModel) {
  add_carried_tensors(origin_, model_);
  ASSERT_GT(num_carried(), 0);
  EXPECT_EQ(std::ssize(model_.tensors), 1 + num_carried());
  EXPECT_EQ(model_.layout.storages().size(), 1 + origin_.layout.storages().size());
  for (std::size_t i = 1; i < model_.links.links.size(); ++i) {
    const auto& link = model_.links.links[i];
    const auto& stored = model_.layout.tensor(link.stored);
    EXPECT_TRUE(origin_.map.is_carried(model_.tensors[link.model].name));
    EXPECT_GE(stored.shards.at(0).at.storage, 1U) << stored.name;
  }
}

TEST_F(CarriedTensorsTest, AddsNothingOfAModelThatHasNone) {
  const auto llama = open(support::test_data("hf_llama") / "hf");
  add_carried_tensors(llama, model_);
  EXPECT_EQ(model_.tensors.size(), 1U);
  EXPECT_EQ(model_.layout.storages().size(), 1U);
}

TEST_F(CarriedTensorsTest, RefusesATowerThatIsQuantised) {
  for (auto& link : origin_.links.links) link.scale = 0;
  EXPECT_TRUE(support::fails(ErrorKind::kUsage, {"visual", "is quantised"},
                             [&] { add_carried_tensors(origin_, model_); }));
}

TEST_F(CarriedTensorsTest, ReadsWhatIsInMemoryThere) {
  distckpt::MemorySource memory(model_.layout);
  CarriedSource source(memory, 1, origin_);
  std::vector<std::byte> found(4);
  std::vector<distckpt::ChecksumPart> parts;
  source.read({.at = model_.layout.tensor(0).shards[0].at, .size = {2}, .element_size = 2}, found,
              parts);
  EXPECT_TRUE(support::same_bytes(bytes_, found));
}

TEST_F(CarriedTensorsTest, ReadsTheTowerFromTheFiles) {
  distckpt::MemorySource memory(model_.layout);
  add_carried_tensors(origin_, model_);
  CarriedSource source(memory, 1, origin_);
  const auto& link = model_.links.links.at(1);
  const auto& stored = model_.layout.tensor(link.stored);
  const auto& shard = stored.shards.at(0);
  std::vector<std::byte> found(static_cast<std::size_t>(stored.num_bytes()));
  std::vector<distckpt::ChecksumPart> parts;
  source.read(
      {.at = shard.at, .size = shard.box.size, .element_size = distckpt::size_of(stored.dtype)},
      found, parts);
  source.commit(parts);
  source.verify();
  const auto file = std::filesystem::path(source.name_of(shard.at.storage));
  const auto all = support::read_bytes(file);
  EXPECT_EQ(file.extension(), ".safetensors");
  EXPECT_TRUE(support::same_bytes(
      std::span(all).subspan(static_cast<std::size_t>(shard.at.offset), found.size()), found));
}

TEST_F(CarriedTensorsTest, ChecksumsOfMemoryAreForTheMemory) {
  // Notes the storages that it is told of.
  struct Memory : distckpt::BoxSource {
    void read(const Region&, std::span<std::byte>, std::vector<distckpt::ChecksumPart>&) override {}
    void commit(std::span<const distckpt::ChecksumPart> parts) override {
      for (const auto& part : parts) storages.push_back(part.storage);
    }
    std::vector<distckpt::StorageId> storages{};
  } memory;
  CarriedSource source(memory, 3, origin_);
  const std::vector<distckpt::ChecksumPart> parts{{.storage = 2}, {.storage = 0}};
  source.commit(parts);
  EXPECT_EQ(memory.storages, (std::vector<distckpt::StorageId>{2, 0}));
}

}  // namespace carried_tensors_test
}  // namespace ferry::converter
