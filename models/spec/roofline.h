// The bound of the speed of generation: a step takes at least as long as the device needs, at its
// rates, to move the bytes that it has to read or to compute the products that it has to.
//
// A step reads every weight that it uses once, and of each decoding sequence its keys and values;
// it takes two floating-point operations for each row and weight. What attention computes, and what
// else is read and written, is left out: so the bound is below what any program can reach.
#pragma once

#include <cstdint>

#include "models/spec/mesh_shape.h"
#include "models/spec/sharding.h"
#include "models/spec/transformer_config.h"

namespace ferry::models {

struct DeviceRates {
  double bytes_per_second = 0;  // the best of reading, and copying (read and written)
  double flops_per_second = 0;  // of a large product, in the model's dtype
};

struct StepWork {
  std::int64_t rows = 0;         // tokens that are computed
  std::int64_t drawn = 0;        // rows that need logits
  std::int64_t cached_keys = 0;  // tokens that decoding rows attend to
};

class Roofline {
 public:
  // Counts the first rank's part of a model on one stage.
  Roofline(const TransformerConfig& config,
           const MeshShape& mesh,
           const LayoutOptions& options,
           DeviceRates rates);

  double seconds(const StepWork& work) const;
  double weight_bytes() const { return dense_bytes_ + expert_bytes_ + head_bytes_; }
  const DeviceRates& rates() const { return rates_; }

 private:
  DeviceRates rates_;
  double item_bytes_ = 0;
  double dense_bytes_ = 0;   // read by every step
  double head_bytes_ = 0;    // of the output layer
  double expert_bytes_ = 0;  // of all experts here
  double experts_of_row_ =
      0;  // share of the experts here that a row meets, over the ranks that share them
  double key_bytes_ = 0;  // of a token, all layers
};

}  // namespace ferry::models
