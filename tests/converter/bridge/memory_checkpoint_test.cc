#include "converter/bridge/memory_checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "converter/convert.h"
#include "converter/verify.h"
#include "distckpt/formats/safetensors.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"
#include "tests/support/trees.h"

namespace ferry::converter {
namespace memory_checkpoint_test {

using support::fails;

// A folder's tensors in memory, as a trainer would have them.
class MemoryCheckpoint : public testing::Test {
 protected:
  void SetUp() override {
    support::write_tiny_model({}, dir_ / "hf", 1);
    bytes_ = support::read_bytes(dir_ / "hf/model.safetensors");
    like_ = open(dir_ / "hf");
    for (const auto& entry :
         distckpt::read_safetensors_header(dir_ / "hf/model.safetensors").entries) {
      tensors_.push_back({.name = entry.name,
                          .dtype = entry.dtype,
                          .shape = entry.shape,
                          .data = bytes_.data() + entry.begin});
    }
  }

  NamedMemory& tensor(std::string_view name) {
    return *std::ranges::find(tensors_, name, &NamedMemory::name);
  }

  support::TempDir dir_;
  std::vector<std::byte> bytes_;
  Checkpoint like_;
  std::vector<NamedMemory> tensors_;
};

TEST_F(MemoryCheckpoint, IsSavedAsTheFolderThatItIsLike) {
  const auto made = checkpoint_in_memory(like_, tensors_);
  convert(
      {.from = dir_ / "hf", .memory = &made, .to = dir_ / "out", .format = Format::kHuggingFace});
  EXPECT_TRUE(support::same_tree(dir_ / "hf", dir_ / "out"));
}

TEST_F(MemoryCheckpoint, HoldsWhatIsInMemoryNotInTheFiles) {
  tensor("model.norm.weight").data[0] ^= std::byte{1};
  const auto made = checkpoint_in_memory(like_, tensors_);
  convert({.from = dir_ / "hf", .memory = &made, .to = dir_ / "out"});
  const auto report = verify({.left = dir_ / "hf", .right = dir_ / "out"});
  ASSERT_EQ(report.tensors.size(), 1U);
  EXPECT_EQ(report.tensors[0].tensor, "model.norm.weight");
}

TEST_F(MemoryCheckpoint, NamesATensorThatIsMissing) {
  tensors_.erase(tensors_.begin());
  EXPECT_TRUE(
      fails(ErrorKind::kLayout, {"is missing"}, [&] { checkpoint_in_memory(like_, tensors_); }));
}

TEST_F(MemoryCheckpoint, NamesATensorThatTheModelLacks) {
  tensors_.push_back(tensors_.front());
  tensors_.back().name = "model.layers.0.mlp.experts.gate_up_proj";
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"model.layers.0.mlp.experts.gate_up_proj"},
                    [&] { checkpoint_in_memory(like_, tensors_); }));
}

TEST_F(MemoryCheckpoint, NamesATensorOfAnotherShape) {
  tensor("model.norm.weight").shape = {3};
  EXPECT_TRUE(fails(ErrorKind::kLayout, {"model.norm.weight", "[3]"},
                    [&] { checkpoint_in_memory(like_, tensors_); }));
}

TEST_F(MemoryCheckpoint, IsNotMadeOfNothing) {
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"no tensors"}, [&] { checkpoint_in_memory(like_, {}); }));
}

TEST_F(MemoryCheckpoint, TakesItsConfigurationFromACheckpointThatHasOne) {
  like_.hf.reset();
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"config.json"}, [&] { checkpoint_in_memory(like_, tensors_); }));
}

TEST_F(MemoryCheckpoint, OfAnotherDTypeSaysSoInItsConfiguration) {
  std::vector<std::byte> zeros(4 * bytes_.size());  // of twice the size each
  for (auto& one : tensors_) {
    one.dtype = distckpt::DType::kF32;
    one.data = zeros.data();
  }
  const auto made = checkpoint_in_memory(like_, tensors_);
  EXPECT_NE(made.hf->config_text().find("float32"), std::string::npos);
  EXPECT_TRUE(made.hf->headers.empty());  // those of the files are of another dtype
}

TEST_F(MemoryCheckpoint, AnyFormatCanBeTheOneThatItIsLike) {
  convert({.from = dir_ / "hf", .to = dir_ / "megatron"});
  const auto made = checkpoint_in_memory(open(dir_ / "megatron"), tensors_);
  EXPECT_FALSE(made.megatron_names);
  EXPECT_FALSE(made.location.iteration.has_value());
  EXPECT_EQ(made.tensors.size(), tensors_.size());
}

}  // namespace memory_checkpoint_test
}  // namespace ferry::converter
