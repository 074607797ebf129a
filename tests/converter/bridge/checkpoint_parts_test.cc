#include "converter/bridge/checkpoint_parts.h"

#include <gtest/gtest.h>

#include "converter/bridge/tensor_stream.h"
#include "distckpt/base/error.h"
#include "tests/support/files.h"

namespace ferry::converter {
namespace checkpoint_parts_test {

using support::test_data;
using Bytes = std::vector<std::byte>;

Bytes read(const std::shared_ptr<const Checkpoint>& checkpoint, const std::string& name) {
  TensorStream stream(checkpoint, box_of_tensor(*checkpoint, name, {}), {});
  Bytes bytes(static_cast<std::size_t>(stream.tensors().front().num_bytes()));
  stream.start({bytes.data()});
  stream.wait({});
  EXPECT_FALSE(stream.wait({}));  // checksums
  return bytes;
}

// Every tensor under both of its names is read from its part as from the whole.
void expect_same(const char* folder, std::size_t largest_part) {
  const CheckpointParts parts(std::make_shared<const Checkpoint>(open(test_data(folder))));
  std::vector<std::string> names;
  for (const auto& tensor : parts.whole()->map.tensors) names.push_back(tensor.name);
  for (const auto& tensor : parts.whole()->map.megatron) names.push_back(single_key(tensor));
  for (const auto& name : names) {
    const auto part = parts.part_with(name);
    EXPECT_LE(part->tensors.size(), largest_part) << name;
    EXPECT_EQ(read(part, name), read(parts.whole(), name)) << name;
  }
}

}  // namespace checkpoint_parts_test

using checkpoint_parts_test::expect_same;
using support::test_data;

TEST(CheckpointParts, AreReadAsTheWholeFromHuggingFace) {
  expect_same("hf_llama/hf", 3);  // query, key and value
}

TEST(CheckpointParts, AreReadAsTheWholeFromStackedLayers) {
  expect_same("llama_tp2pp2", 3);
}

TEST(CheckpointParts, AreReadAsTheWholeFromExperts) {
  expect_same("mixtral_ep2", 3);
}

TEST(CheckpointParts, AreReadAsTheWholeWithScales) {
  expect_same("hf_gpt_oss/hf", 3);
}

TEST(CheckpointParts, HaveNothingOfANameThatIsNone) {
  const CheckpointParts parts(std::make_shared<const Checkpoint>(open(test_data("hf_llama/hf"))));
  const auto part = parts.part_with("model.layers.9.mlp.gate_proj.weight");
  EXPECT_TRUE(part->tensors.empty());
  EXPECT_THROW(box_of_tensor(*part, "model.layers.9.mlp.gate_proj.weight", {}), Error);
}

}  // namespace ferry::converter
