// Helpers of tests of training: tiny models with the same random weights on any mesh, a loss, and
// the whole tensors that ranks (threads of one process) have the parts of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "models/gpt_model.h"
#include "models/spec/transformer_config.h"
#include "tests/support/models/tiny_model.h"

namespace ferry::support {

models::TransformerConfig tiny_config(const TinyModel& model);

// Gives Mixtral's what GPT-OSS has and Mixtral has not, but for the window's size.
void make_gpt_oss(models::TransformerConfig& config);

// Gives Qwen3's what Qwen3-Next has and Qwen3 has not, with attention in the last layer alone.
void make_hybrid(models::TransformerConfig& config);

// Every parameter its part of a whole tensor that follows from key and seed; padding stays zero.
void fill_parameters(models::GPTModel& model, std::uint64_t seed);

std::vector<at::Tensor> random_sequences(const std::vector<std::int64_t>& lengths,
                                         std::int64_t vocab,
                                         std::uint64_t seed);

// This rank's share of the sum over tokens of -log p(token at the same place) / normaliser, from
// the last stage's hidden states; the same on tensor parallel ranks. Packs must need no padding.
at::Tensor token_loss(const models::GPTModel& model,
                      const at::Tensor& hidden,
                      const models::SequencePartition& batch,
                      double normaliser);

// {key: whole tensor} of parts that any number of ranks add.
class WholeTensors {
 public:
  void add(const models::ParameterSpec& spec, const at::Tensor& part);
  void add(const distckpt::LocalShard& shard);  // as fp32
  const std::map<std::string, at::Tensor>& all() const { return tensors_; }

 private:
  std::mutex mutex_;
  std::map<std::string, at::Tensor> tensors_;
};

// The first key whose tensors differ by more than `tolerance` times their largest value, and by how
// much; empty if none does. With 0 every bit counts.
std::string first_difference(const WholeTensors& got,
                             const WholeTensors& expected,
                             double tolerance);

}  // namespace ferry::support
