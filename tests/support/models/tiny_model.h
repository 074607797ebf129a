// Small random Hugging Face checkpoints of all families, from a seed. Their tensors are listed here
// anew, by the names that transformers gives them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <random>
#include <string>

#include "distckpt/base/dtype.h"
#include "models/spec/parallel_config.h"

namespace ferry::support {

struct TinyModel {
  std::string family = "llama";  // model_type
  int num_layers = 2;
  int num_query_groups = 2;
  int heads_per_group = 2;
  int head_dim = 4;
  int hidden = 16;
  int ffn = 24;
  int vocab = 50;
  bool tied = false;
  bool repeat_tied_head = false;  // the file holds lm_head.weight all the same
  bool inv_freq = false;          // present, like in old Llama files
  // For families with experts; the first layers may have none (not Mixtral's).
  int experts = 4;
  int dense_layers = 0;
  int moe_ffn = 8;
  int shared_ffn = 8;  // of Qwen2-MoE; DeepSeek's is a multiple of moe_ffn
  // For DeepSeek.
  int q_lora = 0;
  int kv_lora = 6;
  int rope_dim = 4;
  int v_dim = 6;
  bool expert_bias = true;
  int prediction_layers = 0;
  std::string head{};  // "": a language model; "Token", "Sequence": classification
  int labels = 1;
  distckpt::DType dtype = distckpt::DType::kBF16;
  distckpt::DType norm_dtype = distckpt::DType::kBF16;
  int num_files = 1;

  bool deepseek() const { return family.starts_with("deepseek"); }
  bool has_experts() const { return deepseek() || family == "mixtral" || family.ends_with("_moe"); }
};

// Any model, for property tests.
TinyModel random_tiny_model(std::mt19937_64& random);

// Any layout that the model can be split into.
models::ParallelConfig random_layout(const TinyModel& model, std::mt19937_64& random);

// Writes config.json, generation_config.json, tokenizer.json and the weights, in a header order of
// its own.
void write_tiny_model(const TinyModel& model,
                      const std::filesystem::path& folder,
                      std::uint64_t seed);

// {relative name: content} of every file below a folder.
std::map<std::string, std::string> read_tree(const std::filesystem::path& folder);

}  // namespace ferry::support
