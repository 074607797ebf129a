// One shaped row of logits on the host, taken through the steps of rollout/sampler.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "rollout/kernels/draw_row.h"

namespace ferry::rollout {

class HostRow {
 public:
  // Uses `z` [vocab_size] as its memory. Both arguments outlive the row.
  HostRow(const DrawRow& draw, std::vector<float>& z) : draw_(draw), z_(z) {}

  // Applies penalties and temperature. logits [vocab_size], bf16 or fp32.
  template <typename T>
  void read(const T* logits, std::span<const LogitChange> changes) {
    for (std::size_t i = 0; i < z_.size(); ++i)
      z_[i] = usable(static_cast<float>(logits[i])) * draw_.inverse_temperature;
    for (const auto& change : changes) {
      const auto token = static_cast<std::size_t>(change.token);
      z_[token] = change(usable(static_cast<float>(logits[token])), draw_.penalties) *
                  draw_.inverse_temperature;
    }
    find_maximum();
  }
  // Applies min_p, top_k and top_p: tokens that are not kept get -inf, and so are not drawn.
  void truncate();
  std::int64_t draw() const;
  // The token's log-probability in the processed distribution, after truncate().
  float log_prob(std::int64_t token) const;

 private:
  void find_maximum();
  std::uint64_t mass(float z) const { return mass_of(below_maximum(z, maximum_)); }
  std::uint64_t sum(std::span<const std::uint64_t> keys) const;
  std::uint64_t last_within(std::span<std::uint64_t> keys, std::uint64_t limit) const;

  const DrawRow& draw_;
  std::vector<float>& z_;
  float maximum_ = kMinusInfinity;
  std::uint64_t total_ = 0;  // mass of the kept tokens
};

}  // namespace ferry::rollout
