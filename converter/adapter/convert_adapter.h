// Converts a LoRA adapter between PEFT, verl and Megatron-Bridge: no element changes unless a dtype
// is asked for, and what was written is proved as a conversion's is.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "converter/adapter/open_adapter.h"
#include "converter/progress.h"
#include "converter/write/publication.h"
#include "models/spec/parallel_config.h"

namespace ferry::converter {

struct ConvertAdapterOptions {
  std::filesystem::path from{};
  std::filesystem::path to{};
  std::filesystem::path base{};       // the checkpoint that the adapter changes
  std::filesystem::path hf_config{};  // of a Megatron base
  AdapterForm form = AdapterForm::kPeft;
  models::ParallelConfig parallel{};       // of a target of Megatron-Bridge
  std::optional<double> alpha{};           // OpenAdapterOptions::alpha
  std::optional<distckpt::DType> dtype{};  // of the target; default: each factor keeps its own
  int threads = 0;                         // 0: one per core
  std::int64_t max_memory = std::int64_t{192} << 20;
};

struct ConvertAdapterReport {
  AdapterForm source_form = AdapterForm::kPeft;
  AdapterForm target_form = AdapterForm::kPeft;
  std::filesystem::path source{};
  std::filesystem::path target{};  // the folder that was published
  bool canonical = false;          // of Megatron-Bridge's form: CanonicalLoRA, else LoRA
  std::int64_t num_factors = 0;    // tensors, in PEFT's terms
  std::int64_t num_parameters = 0;
  std::int64_t bytes = 0;
};

// Publishes the target atomically, or nothing. Throws Error as open_adapter() does; Error(kUsage)
// if something is at the target; Error(kLayout) for settings that the target's form does not have.
ConvertAdapterReport convert_adapter(const ConvertAdapterOptions& options,
                                     const ProgressFunction& progress = {});

// The folder that a conversion of these options publishes. Throws Error(kUsage) for a layout that
// the form does not have.
std::filesystem::path adapter_target(const ConvertAdapterOptions& options);

// The second half of convert_adapter(): writes an adapter of `base` that is open, proves it and
// publishes it as the Publication of adapter_target(). `from` of the options is what is read.
ConvertAdapterReport write_adapter(Adapter adapter,
                                   const Checkpoint& base,
                                   const ConvertAdapterOptions& options,
                                   Publication& target,
                                   const ProgressFunction& progress = {});

}  // namespace ferry::converter
