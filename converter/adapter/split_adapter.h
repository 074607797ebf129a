// The way back from a merge: a LoRA adapter of two checkpoints, whose product is the best
// approximation of their difference at that rank.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "converter/adapter/convert_adapter.h"
#include "converter/stored/part.h"
#include "distckpt/storage/filenames.h"

namespace ferry::converter {

struct SplitOptions {
  std::filesystem::path base{};
  std::filesystem::path tuned{};
  std::filesystem::path to{};
  std::optional<distckpt::Iteration> base_iteration{};
  std::optional<distckpt::Iteration> tuned_iteration{};
  std::filesystem::path hf_config{};  // of Megatron checkpoints without one
  Selection selection{};              // tensors that are not selected are not looked at
  std::int64_t rank = 0;
  AdapterForm form = AdapterForm::kPeft;
  models::ParallelConfig parallel{};                  // of a target of Megatron-Bridge
  int threads = 0;                                    // 0: one per core
  std::int64_t max_memory = std::int64_t{192} << 20;  // of staging buffers
};

// A weight, or the gate and up projections of an expert, whose factors are one pair.
struct SplitTensor {
  std::string name{};  // the first tensor's, in Hugging Face terms
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  double change = 0;  // Frobenius norm of tuned - base
  double error = 0;   // ... of tuned - base - the product of the factors
};

struct SplitReport {
  ConvertAdapterReport written{};
  std::vector<SplitTensor> tensors{};  // that differ
  std::int64_t num_equal = 0;          // tensors of both
  std::int64_t num_parameters = 0;     // of the adapter
  double change = 0;                   // Frobenius norms over all of `tensors`
  double error = 0;
  double seconds = 0;
};

// Both are read once, side by side; in memory are one pair of weights, their difference in fp32,
// and the staging buffers. The product's factor is 1 (alpha is the rank). Publishes the target
// atomically, or nothing. Throws Error(kLayout) for two models, and naming a tensor that differs
// and that no adapter of this form changes (a norm, a bias, an embedding); Error(kUsage)
// where nothing differs or something is at the target.
SplitReport split_adapter(const SplitOptions& options, const ProgressFunction& progress = {});

}  // namespace ferry::converter
