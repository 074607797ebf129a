// Small random Hugging Face checkpoints of the dense families, from a seed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <random>
#include <string>

#include "distckpt/dtype.h"

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
  bool inv_freq = false;          // as old Llama files have it
  distckpt::DType dtype = distckpt::DType::kBF16;
  distckpt::DType norm_dtype = distckpt::DType::kBF16;
  int num_files = 1;
};

// Any model, for property tests.
TinyModel random_tiny_model(std::mt19937_64& random);

// Writes config.json, generation_config.json, tokenizer.json and the weights, in a header order of
// its own.
void write_tiny_model(const TinyModel& model,
                      const std::filesystem::path& folder,
                      std::uint64_t seed);

// {relative name: content} of every file below a folder.
std::map<std::string, std::string> read_tree(const std::filesystem::path& folder);

}  // namespace ferry::support
