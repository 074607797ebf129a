// The parallel layout of a model in Megatron's terms: sizes of the parallel groups, and the layers
// of each pipeline stage.
#pragma once

#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

namespace ferry::models {

struct ParallelConfig {
  int tensor_model_parallel_size = 1;
  int pipeline_model_parallel_size = 1;
  int context_parallel_size = 1;
  int expert_model_parallel_size = 1;
  std::optional<int> expert_tensor_parallel_size{};           // default: tensor_model_parallel_size
  std::optional<int> virtual_pipeline_model_parallel_size{};  // chunks of layers per stage
  std::optional<int> num_layers_in_first_pipeline_stage{};
  std::optional<int> num_layers_in_last_pipeline_stage{};
  bool account_for_embedding_in_pipeline_split = false;
  bool account_for_loss_in_pipeline_split = false;
  std::string pipeline_model_parallel_layout{};  // "Et*3|(tt|)*2,L"; empty: shared out evenly
  int make_vocab_size_divisible_by = 128;

  int expert_tensor_parallel() const {
    return expert_tensor_parallel_size.value_or(tensor_model_parallel_size);
  }
  // The fewest ranks of a stage that hold both the dense layers and the experts.
  int stage_size() const {
    return std::lcm(tensor_model_parallel_size,
                    expert_tensor_parallel() * expert_model_parallel_size);
  }
  int world_size() const { return stage_size() * pipeline_model_parallel_size; }

  // Rows of the embedding and the output layer: vocab_size rounded up to a multiple of
  // make_vocab_size_divisible_by * tp (Megatron-LM training/tokenizer, _vocab_size_with_padding).
  std::int64_t padded_vocab_size(std::int64_t vocab_size) const;

  // Layers per stage, first to last. Throws Error(kUsage) if they cannot be shared out
  // (Megatron-Core transformer_block.get_num_layers_to_build).
  std::vector<int> layers_per_stage(int num_layers) const;

  bool operator==(const ParallelConfig&) const = default;
};

}  // namespace ferry::models
