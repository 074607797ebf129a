#include "rollout/kernels/host_row.h"

#include <algorithm>
#include <functional>

#include "rollout/kernels/best_token.h"

namespace ferry::rollout {
namespace {

void keep_from(std::uint64_t least, std::vector<std::uint64_t>& keys) {
  std::erase_if(keys, [&](std::uint64_t key) { return key < least; });
}

}  // namespace

void HostRow::find_maximum() {
  maximum_ = *std::max_element(z_.begin(), z_.end());
}

void HostRow::truncate() {
  std::vector<std::uint64_t> kept;  // keys
  const auto least = least_mass(draw_.min_p);
  for (std::size_t i = 0; i < z_.size(); ++i)
    if (least == 0 || mass(z_[i]) >= least)
      kept.push_back(rank_key(z_[i], static_cast<std::int64_t>(i)));
  if (draw_.top_k > 0 && static_cast<std::size_t>(draw_.top_k) < kept.size()) {
    const auto last = kept.begin() + draw_.top_k - 1;
    std::nth_element(kept.begin(), last, kept.end(), std::greater<>());
    keep_from(*last >> 32 << 32, kept);
  }
  if (draw_.top_p < 1) keep_from(last_within(kept, mass_limit(draw_.top_p, sum(kept))), kept);
  total_ = sum(kept);
  if (kept.size() == z_.size()) return;
  std::ranges::fill(z_, kMinusInfinity);
  for (const auto key : kept) z_[static_cast<std::size_t>(token_of_key(key))] = logit_of_key(key);
}

std::int64_t HostRow::draw() const {
  return best_token(draw_, z_.data(), 1, 0, static_cast<std::int64_t>(z_.size())).token;
}

float HostRow::log_prob(std::int64_t token) const {
  return processed_log_prob(below_maximum(z_[static_cast<std::size_t>(token)], maximum_), total_);
}

std::uint64_t HostRow::sum(std::span<const std::uint64_t> keys) const {
  std::uint64_t total = 0;
  for (const auto key : keys) total += mass(logit_of_key(key));
  return total;
}

// The smallest key whose larger keys have less mass than the limit together; found by halving.
std::uint64_t HostRow::last_within(std::span<std::uint64_t> keys, std::uint64_t limit) const {
  std::uint64_t before = 0;
  while (keys.size() > 1) {
    const auto half = keys.size() / 2;
    std::nth_element(keys.begin(), keys.begin() + static_cast<std::ptrdiff_t>(half), keys.end(),
                     std::greater<>());
    const auto upper = sum(keys.first(half));
    if (before + upper >= limit) {
      keys = keys.first(half);
    } else {
      before += upper;
      keys = keys.subspan(half);
    }
  }
  return keys[0];
}

}  // namespace ferry::rollout
