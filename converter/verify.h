// Compares two checkpoints, in any formats and layouts, bit for bit in Hugging Face terms.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "converter/checkpoint_pair.h"
#include "converter/progress.h"

namespace ferry::converter {

// A tensor whose bytes are not the same.
struct TensorDifference {
  std::string tensor{};
  // The first differing element in row-major order, and its two values.
  distckpt::Dims first_element{};
  double left_value = 0;
  double right_value = 0;
  std::int64_t num_different = 0;
  std::int64_t num_elements = 0;
  std::optional<double> max_difference{};  // of finite elements; nothing if there are none
  std::optional<std::uint64_t> max_ulps{};
};

struct VerifyReport {
  std::filesystem::path left{};
  std::filesystem::path right{};
  Format left_format = Format::kHuggingFace;
  Format right_format = Format::kHuggingFace;
  std::int64_t num_compared = 0;  // tensors whose bytes were compared
  std::int64_t bytes = 0;
  std::vector<UnpairedTensor> unpaired{};
  std::vector<TensorDifference> tensors{};
  std::vector<std::string>
      configuration{};               // differences of config.json, "rope_theta: 10000.0, 500000.0"
  std::vector<std::string> files{};  // differences of the files that travel with the weights
  std::vector<std::string> notes{};  // what was not compared, and why
  bool is_part = false;              // a selection of tensors was compared, others were not
  double seconds = 0;

  // Every tensor of both, or of the selection, was compared and equal; so are configuration and
  // files, as far as both have them.
  bool identical() const {
    return unpaired.empty() && tensors.empty() && configuration.empty() && files.empty();
  }
};

// `weights_only`: leaves configuration and carried files alone.
VerifyReport verify(const PairOptions& pair,
                    bool weights_only = false,
                    const ProgressFunction& progress = {});

}  // namespace ferry::converter
