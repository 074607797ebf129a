// The certificate of a machine: for the shapes of one model, whether the operations that kBitwise
// is built of keep a row's bits whatever stands beside it, however a weight is sliced over ranks,
// and in whatever order rows come. It measures; it believes no table.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "models/kernels/attention/attention.h"
#include "models/kernels/delta/delta_rule.h"
#include "models/spec/transformer_config.h"

namespace ferry::models {

// One property of one operation. Where it does not hold, `detail` says how far.
struct NumericsCheck {
  std::string subject{};   // "linear_fc2 1536x8960"
  std::string property{};  // "rows", "slices", "order", "packing", ...
  bool passed = false;
  std::string detail{};
};

struct NumericsCertificate {
  std::vector<std::pair<std::string, std::string>> environment{};  // what bits may depend on
  std::vector<NumericsCheck> checks{};
  // Comparisons with the kernels that transformers gets in fp32 on the host, which MKL chooses by
  // machine, shape and threads: those of fp32 models, and of gated delta nets in any dtype. They
  // say whether transformers has our bits here; our own results do not depend on them.
  std::vector<NumericsCheck> transformers{};
  std::vector<std::string> kernels{};  // chosen on a GPU, one a line
  double seconds = 0;

  bool passed() const;
  bool equals_transformers() const;
};

// The operations that certify_numerics() examines: those of kBitwise (bitwise_ops()), unless a test
// puts others in their place.
struct NumericsOps {
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias)>
      linear{};
  decltype(linear) slice{};  // of weights that ranks share out
  decltype(linear) head{};   // of classification
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight)> rms_norm{};
  std::function<at::Tensor(const at::Tensor& query,
                           const at::Tensor& key,
                           const at::Tensor& value,
                           const std::vector<AttentionSegment>& segments,
                           const AttentionOptions& options)>
      attention{};
  // Attention of a frame's patches in a vision tower, on the host.
  std::function<at::Tensor(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, Alignment alignment)>
      attention_of_frame{};
  std::function<DeltaResult(const DeltaRows& rows, const at::Tensor& state, Alignment alignment)>
      delta_rule{};  // on the host
};
NumericsOps bitwise_ops(at::Device device);

struct NumericsOptions {
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kBFloat16;
  // Columns of a weight beyond this many are left out; 0: none. A host takes long over a
  // vocabulary.
  std::int64_t most_columns = 0;
};

NumericsCertificate certify_numerics(const TransformerConfig& config,
                                     const NumericsOptions& options,
                                     const NumericsOps& ops);

}  // namespace ferry::models
