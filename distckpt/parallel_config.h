// How a model is spread over ranks, in Megatron's terms: sizes of the parallel groups, and which
// layers a pipeline stage has.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace ferry::distckpt {

struct ParallelConfig {
  int tensor_model_parallel_size = 1;
  int pipeline_model_parallel_size = 1;
  int context_parallel_size = 1;
  int expert_model_parallel_size = 1;
  std::optional<int> expert_tensor_parallel_size{};  // default: tensor_model_parallel_size
  int data_parallel_size = 1;
  std::optional<int> num_layers_in_first_pipeline_stage{};
  std::optional<int> num_layers_in_last_pipeline_stage{};
  int make_vocab_size_divisible_by = 128;

  int model_parallel_size() const {
    return tensor_model_parallel_size * pipeline_model_parallel_size;
  }

  // Rows of the embedding and the output layer: vocab_size rounded up to a multiple of
  // make_vocab_size_divisible_by * tp (Megatron-LM training/tokenizer, _vocab_size_with_padding).
  std::int64_t padded_vocab_size(std::int64_t vocab_size) const;

  // Layers per stage, first to last. Throws Error(kUsage) if they cannot be shared out
  // (Megatron-Core transformer_block.get_num_layers_to_build).
  std::vector<int> layers_per_stage(int num_layers) const;

  bool operator==(const ParallelConfig&) const = default;
};

}  // namespace ferry::distckpt
