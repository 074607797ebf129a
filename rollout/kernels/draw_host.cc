#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <span>
#include <vector>

#include "rollout/kernels/draw.h"

namespace ferry::rollout {
namespace {

constexpr std::int64_t kChunk = 64;  // tokens whose noise is computed at once, as vectors

using Noise = std::array<float, kChunk>;

// Of the tokens first .. first + 63.
__attribute__((target_clones("avx2", "default"))) void fill_noise(const DrawRow& draw,
                                                                  std::int64_t first,
                                                                  Noise& noise) {
  std::array<std::array<std::uint32_t, kChunk / 4>, 4> bits;
  for (std::uint32_t i = 0; i < kChunk / 4; ++i) {
    const auto quad = static_cast<std::uint32_t>(first / 4) + i;
    const auto random = philox(draw_counter(draw.request, draw.position, quad), draw.seed);
    for (std::size_t k = 0; k < 4; ++k) bits[k][i] = random.at[k];
  }
  for (std::size_t k = 0; k < 4; ++k)
    for (std::size_t i = 0; i < kChunk / 4; ++i) noise[4 * i + k] = gumbel_noise(bits[k][i]);
}

// One row, on its way through the steps of sampler.h.
class Row {
 public:
  Row(const DrawRow& draw, std::vector<float>& z) : draw_(draw), z_(z) {}

  template <typename T>
  void read(const T* logits, std::span<const LogitChange> changes) {
    for (std::size_t i = 0; i < z_.size(); ++i)
      z_[i] = usable(static_cast<float>(logits[i])) * draw_.inverse_temperature;
    for (const auto& change : changes) {
      const auto token = static_cast<std::size_t>(change.token);
      z_[token] = change(usable(static_cast<float>(logits[token])), draw_.penalties) *
                  draw_.inverse_temperature;
    }
    maximum_ = *std::max_element(z_.begin(), z_.end());
  }

  // min_p, top_k, top_p.
  void truncate() {
    least_mass_ = least_mass(draw_.min_p);
    std::vector<Candidate> kept;
    for (std::size_t i = 0; i < z_.size(); ++i) {
      const Candidate candidate{.key = key(i), .mass = mass(i)};
      if (candidate.mass >= least_mass_) kept.push_back(candidate);
    }
    if (draw_.top_k > 0 && static_cast<std::size_t>(draw_.top_k) < kept.size()) {
      const auto last = kept.begin() + draw_.top_k - 1;
      std::nth_element(kept.begin(), last, kept.end(), larger);
      cutoff_ = last->key >> 32 << 32;
      std::erase_if(kept, [&](const Candidate& token) { return token.key < cutoff_; });
    }
    if (draw_.top_p < 1) cutoff_ = last_within(kept, mass_limit(draw_.top_p, sum(kept)));
  }

  std::int64_t draw() const {
    const auto size = static_cast<std::int64_t>(z_.size());
    float best = kMinusInfinity;
    std::int64_t token = -1;
    for (std::int64_t first = 0; first < size; first += kChunk) {
      const auto end = std::min(size, first + kChunk);
      const float largest = *std::max_element(z_.begin() + first, z_.begin() + end);
      if (token >= 0 && largest + (draw_.greedy ? 0 : kMostNoise) <= best) continue;
      Noise noise{};
      if (!draw_.greedy) fill_noise(draw_, first, noise);
      for (auto i = first; i < end; ++i) {
        const float sum =
            z_[static_cast<std::size_t>(i)] + noise[static_cast<std::size_t>(i - first)];
        if ((token >= 0 && sum <= best) || !is_kept(static_cast<std::size_t>(i))) continue;
        best = sum;
        token = i;
      }
    }
    return token;
  }

  float log_prob(std::int64_t token) const {
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < z_.size(); ++i) total += is_kept(i) ? mass(i) : 0;
    return processed_log_prob(below_maximum(z_[static_cast<std::size_t>(token)], maximum_), total);
  }

 private:
  struct Candidate {
    std::uint64_t key = 0;
    std::uint64_t mass = 0;
  };

  static bool larger(const Candidate& a, const Candidate& b) { return a.key > b.key; }
  static std::uint64_t sum(std::span<const Candidate> tokens) {
    std::uint64_t total = 0;
    for (const auto& token : tokens) total += token.mass;
    return total;
  }

  // The smallest key before which there is less mass than the limit, by halves.
  static std::uint64_t last_within(std::span<Candidate> tokens, std::uint64_t limit) {
    std::uint64_t before = 0;
    while (tokens.size() > 1) {
      const auto half = tokens.size() / 2;
      std::nth_element(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(half),
                       tokens.end(), larger);
      const auto upper = sum(tokens.first(half));
      if (before + upper >= limit) {
        tokens = tokens.first(half);
      } else {
        before += upper;
        tokens = tokens.subspan(half);
      }
    }
    return tokens[0].key;
  }

  std::uint64_t key(std::size_t i) const { return rank_key(z_[i], static_cast<std::int64_t>(i)); }
  std::uint64_t mass(std::size_t i) const { return mass_of(below_maximum(z_[i], maximum_)); }
  bool is_kept(std::size_t i) const {
    return (cutoff_ == 0 || key(i) >= cutoff_) && (least_mass_ == 0 || mass(i) >= least_mass_);
  }

  const DrawRow& draw_;
  std::vector<float>& z_;  // [vocab_size]
  float maximum_ = kMinusInfinity;
  std::uint64_t least_mass_ = 0;
  std::uint64_t cutoff_ = 0;
};

template <typename T>
void draw_rows(const at::Tensor& logits,
               std::int64_t vocab_size,
               const Draws& draws,
               at::Tensor& tokens,
               at::Tensor& processed_logprobs) {
  const auto* values = logits.const_data_ptr<T>();
  auto* drawn = tokens.mutable_data_ptr<std::int64_t>();
  auto* log_probs = processed_logprobs.mutable_data_ptr<float>();
  const auto num_plain = static_cast<std::int64_t>(draws.plain.size());
  at::parallel_for(0, logits.size(0), 1, [&](std::int64_t begin, std::int64_t end) {
    std::vector<float> z(static_cast<std::size_t>(vocab_size));
    for (auto i = begin; i < end; ++i) {
      const bool shaped = i >= num_plain;
      const auto& draw = shaped ? draws.shaped[static_cast<std::size_t>(i - num_plain)]
                                : draws.plain[static_cast<std::size_t>(i)];
      Row row(draw, z);
      row.read(values + draw.row * logits.size(1),
               std::span(draws.changes)
                   .subspan(static_cast<std::size_t>(draw.first_change),
                            static_cast<std::size_t>(draw.num_changes)));
      if (shaped) row.truncate();
      drawn[draw.row] = row.draw();
      if (shaped) log_probs[draw.row] = row.log_prob(drawn[draw.row]);
    }
  });
}

}  // namespace

void draw_on_host(const at::Tensor& logits,
                  std::int64_t vocab_size,
                  const Draws& draws,
                  at::Tensor& tokens,
                  at::Tensor& processed_logprobs) {
  if (logits.scalar_type() == at::kFloat) {
    draw_rows<float>(logits, vocab_size, draws, tokens, processed_logprobs);
  } else {
    draw_rows<at::BFloat16>(logits, vocab_size, draws, tokens, processed_logprobs);
  }
}

}  // namespace ferry::rollout
