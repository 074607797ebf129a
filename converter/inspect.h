// Describes a checkpoint from its headers alone: fast, whatever its size.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "converter/open/checkpoint.h"
#include "models/spec/parallel_config.h"

namespace ferry::converter {

struct InspectedChunk {
  std::string file{};
  std::int64_t offset = 0;  // of the bytes, or of the archive that holds them
  std::int64_t length = 0;
  distckpt::Box box{};
};

struct InspectedTensor {
  std::string name{};  // as it is stored
  distckpt::DType dtype = distckpt::DType::kBF16;
  distckpt::Shape shape{};
  std::vector<InspectedChunk> chunks{};
};

struct InspectReport {
  Location location{};
  std::optional<models::TransformerConfig> config{};  // nothing if the checkpoint does not say
  std::string config_problem{};                       // why not
  bool only_sizes = false;  // of a family that passes through: the rest of `config` is not known
  std::optional<models::ParallelConfig> saved_with{};  // what Megatron's arguments say
  bool has_sidecar = false;
  Part part{};  // of the model, that is there; empty: all of it
  std::vector<InspectedTensor> tensors{};
  std::vector<std::string> objects{};
  std::optional<std::int64_t> num_parameters{};  // of the model, if its sizes are known
  std::int64_t num_stored = 0;  // elements of model tensors, with padding and second copies
  std::int64_t num_bytes = 0;
  std::map<std::string, std::int64_t> elements_by_dtype{};
  std::map<std::string, std::int64_t> chunks_by_file{};
  std::int64_t num_training_state = 0;
  std::int64_t num_adapter_tensors = 0;  // factors of a LoRA adapter, beside the model or alone
};

InspectReport inspect(const std::filesystem::path& path,
                      std::optional<distckpt::Iteration> iteration,
                      const std::filesystem::path& hf_config);

}  // namespace ferry::converter
