// How fast a step of generation could be at best: the device moves the bytes that it has to read,
// or computes the products that it has to, at the rates that were measured on it.
//
// A step reads every weight that it uses once, and of each decoding sequence its keys and values;
// it takes two floating-point operations for each row and weight. What attention computes, and what
// else is read and written, is left out: so the bound is below what any program can reach.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "models/gpt_model.h"

namespace ferry::cli {

struct DeviceRates {
  double bytes_per_second = 0;  // the best of reading, and copying (read and written)
  double flops_per_second = 0;  // of a large product, in the model's dtype
};
// Takes about a second.
DeviceRates measure_rates(c10::Device device, distckpt::DType dtype);

struct StepWork {
  std::int64_t rows = 0;         // tokens that are computed
  std::int64_t drawn = 0;        // rows that need logits
  std::int64_t cached_keys = 0;  // tokens that decoding rows attend to
};

class Roofline {
 public:
  // Counts this rank's part of the model.
  Roofline(const models::GPTModel& model, DeviceRates rates);

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

}  // namespace ferry::cli
