// A model beside a reference, byte for byte: the logits of every sequence, and where the reference
// has them the outputs of every module, so that the first one that differs has a name.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "converter/alignment/reference.h"
#include "models/gpt_model.h"

namespace ferry::converter {

// Two tensors of one shape.
struct OutputDifference {
  std::string module{};  // "decoder.layers.3.mlp", "logits"
  std::int64_t elements = 0;
  std::int64_t unequal = 0;       // in any bit, but that NaN equals NaN
  double largest = 0;             // |a - b|
  std::int64_t largest_ulps = 0;  // steps between neighbouring numbers of the dtype
  bool finite = true;             // ours
};

struct SequenceDifference {
  std::int64_t num_tokens = 0;
  OutputDifference logits{};
  double largest_log_prob = 0;  // of the tokens of the sequence: what reinforcement learning sees
  double mean_log_prob = 0;
  std::vector<OutputDifference> modules{};  // in the order in which they are computed
};

struct LogitsReport {
  std::string regime{};  // of the reference
  bool packed = false;
  std::vector<SequenceDifference> sequences{};

  bool equal() const;
  // The sequence, and the first module of it that differs.
  std::optional<std::pair<std::size_t, OutputDifference>> first_difference() const;
};

struct LogitsOptions {
  bool packed = false;  // all sequences in one batch, else one at a time
};

// Called by all ranks of a mesh; all get the report. Throws Error(kLayout) if the reference is of
// another vocabulary or dtype.
LogitsReport check_logits(const std::vector<std::unique_ptr<models::GPTModel>>& chunks,
                          const Reference& reference,
                          const LogitsOptions& options);

// Throws Error(kLayout) if the shapes or dtypes differ.
OutputDifference compare_tensors(const std::string& module,
                                 const at::Tensor& ours,
                                 const at::Tensor& theirs);

}  // namespace ferry::converter
