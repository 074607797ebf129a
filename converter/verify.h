// Compares two checkpoints, in any formats and layouts, bit for bit in Hugging Face terms.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "converter/checkpoint.h"
#include "converter/progress.h"

namespace ferry::converter {

struct VerifyOptions {
  std::filesystem::path left{};
  std::filesystem::path right{};
  std::optional<distckpt::Iteration> left_iteration{};
  std::optional<distckpt::Iteration> right_iteration{};
  std::filesystem::path hf_config{};  // for those of the two that are Megatron checkpoints
  bool weights_only = false;          // leave configuration and carried files alone
  int threads = 0;
  std::int64_t max_memory = std::int64_t{192} << 20;
};

struct TensorDifference {
  enum class Kind { kOnlyLeft, kOnlyRight, kShape, kDType, kValues };
  Kind kind = Kind::kValues;
  std::string tensor{};
  std::string detail{};  // kShape, kDType: both of them

  // kValues. The first differing element in row-major order, and its two values.
  distckpt::Dims first_element{};
  double left_value = 0;
  double right_value = 0;
  std::int64_t num_different = 0;
  std::int64_t num_elements = 0;
  std::optional<double> max_difference{};  // nothing if only NaNs or signs of zero differ
  std::optional<std::uint64_t> max_ulps{};
};

struct VerifyReport {
  std::filesystem::path left{};
  std::filesystem::path right{};
  Format left_format = Format::kHuggingFace;
  Format right_format = Format::kHuggingFace;
  std::int64_t num_compared = 0;  // tensors whose bytes were compared
  std::int64_t bytes = 0;
  std::vector<TensorDifference> tensors{};
  std::vector<std::string>
      configuration;                 // differences of config.json, "rope_theta: 10000.0, 500000.0"
  std::vector<std::string> files{};  // differences of the files that travel with the weights
  std::vector<std::string> notes{};  // what was not compared, and why
  double seconds = 0;

  // Every tensor of both was compared and equal; so are configuration and files, as far as both
  // have them.
  bool identical() const { return tensors.empty() && configuration.empty() && files.empty(); }
};

VerifyReport verify(const VerifyOptions& options, const ProgressFunction& progress = {});

}  // namespace ferry::converter
