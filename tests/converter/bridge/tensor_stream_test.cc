#include "converter/bridge/tensor_stream.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/support/expect.h"
#include "tests/support/files.h"

namespace ferry::converter {
namespace tensor_stream_test {

using support::fails;
using support::test_data;

std::shared_ptr<const Checkpoint> opened(const char* name) {
  return std::make_shared<const Checkpoint>(open(test_data(name) / "hf"));
}

// Reads all that is wanted; the names, in order.
std::vector<std::string> read_all(const std::shared_ptr<const Checkpoint>& checkpoint,
                                  const WantedTensors& wanted) {
  TensorStream stream(checkpoint, wanted, {.threads = 1});
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::string> names;
  while (const auto batch = stream.next_batch()) {
    std::vector<std::byte*> pointers;
    for (auto i = batch->begin; i < batch->end; ++i) {
      const auto bytes = static_cast<std::size_t>(stream.tensors()[i].num_bytes());
      pointers.push_back(memory.emplace_back(bytes + 1).data());
      names.push_back(stream.tensors()[i].name);
    }
    stream.start(pointers);
  }
  while (const auto done = stream.wait({})) stream.release(*done);
  return names;
}

TEST(TensorStream, GivesEveryTensorOfTheModelOnce) {
  const auto checkpoint = opened("hf_qwen3_vl");
  const auto names = read_all(checkpoint, whole_tensors(*checkpoint, {}));
  EXPECT_EQ(names.size(), checkpoint->tensors.size());
  EXPECT_EQ(std::set(names.begin(), names.end()).size(), names.size());
}

// Towers are carried beside the model: no module of Megatron-Core's has their tensors.
TEST(TensorStream, LeavesATowerOutOfMegatronsTensors) {
  const auto checkpoint = opened("hf_qwen3_vl");
  const auto names = read_all(checkpoint, tensors_of_rank(*checkpoint, {}, 0, {}));
  EXPECT_EQ(names.size(), checkpoint->map.megatron.size());
  EXPECT_EQ(
      std::ranges::find_if(names, [](const auto& name) { return name.starts_with("vision"); }),
      names.end());
}

TEST(TensorStream, ReadsOneOfMegatronsTensorsBesideATower) {
  const auto checkpoint = opened("hf_gemma3");
  const std::string key = "decoder.final_layernorm.weight";
  EXPECT_EQ(read_all(checkpoint, box_of_tensor(*checkpoint, key, {})), std::vector{key});
}

TEST(TensorsOfRank, APatternMayMatchNothingOfOneRank) {
  const auto checkpoint = opened("hf_llama");
  const models::ParallelConfig two_stages{.pipeline_model_parallel_size = 2};
  const Selection head{.include = {"output_layer.*"}};
  const auto first = tensors_of_rank(*checkpoint, two_stages, 0, head);
  EXPECT_TRUE(first.tensors.empty());
  EXPECT_TRUE(read_all(checkpoint, first).empty());
  EXPECT_EQ(tensors_of_rank(*checkpoint, two_stages, 1, head).tensors.size(), 1U);
}

TEST(TensorsOfRank, APatternThatNoRankMatchesIsRefusedByAll) {
  const auto checkpoint = opened("hf_llama");
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(
        fails(ErrorKind::kUsage, {"'*.router.*'", "matches no parameter of the model"}, [&] {
          tensors_of_rank(*checkpoint, {.pipeline_model_parallel_size = 2}, rank,
                          {.include = {"*.router.*"}});
        }));
  }
}

TEST(TensorsOfRank, TheMeshHasTheRank) {
  const auto checkpoint = opened("hf_llama");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"rank 1: the mesh has 1 ranks"},
                    [&] { tensors_of_rank(*checkpoint, {}, 1, {}); }));
}

TEST(BoxOfTensor, NamesATensorThatTheModelLacks) {
  const auto checkpoint = opened("hf_llama");
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"model.layers.99", "neither a Hugging Face tensor"},
                    [&] { box_of_tensor(*checkpoint, "model.layers.99", {}); }));
}

TEST(BoxOfTensor, StaysInTheTensor) {
  const auto checkpoint = opened("hf_llama");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"model.norm.weight", "is no box of its shape"}, [&] {
    box_of_tensor(*checkpoint, "model.norm.weight",
                  distckpt::Box{.offset = {0}, .size = {1'000'000}});
  }));
}

}  // namespace tensor_stream_test
}  // namespace ferry::converter
