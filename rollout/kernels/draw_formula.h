// The arithmetic of drawing a token, the same bits on the host and on a GPU: Philox4x32-10, Gumbel
// noise, exponentials and logarithms made of additions and multiplications that are rounded one by
// one (compiled without contraction to fused multiply-adds), and sums of probabilities in integers,
// whose order does not matter.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace ferry::rollout {

// ---- random bits -------------------------------------------------------------------------------

// Philox4x32-10: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC11). The result is a
// function of the counter and the key alone.
struct PhiloxCounter {
  std::uint32_t at[4] = {};
};

constexpr PhiloxCounter philox(PhiloxCounter counter, std::uint64_t key) {
  auto& c = counter.at;
  auto key0 = static_cast<std::uint32_t>(key);
  auto key1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53} * c[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57} * c[2];
    c[0] = static_cast<std::uint32_t>(b >> 32) ^ c[1] ^ key0;
    c[2] = static_cast<std::uint32_t>(a >> 32) ^ c[3] ^ key1;
    c[1] = static_cast<std::uint32_t>(b);
    c[3] = static_cast<std::uint32_t>(a);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  return counter;
}

// The counter whose four numbers belong to the tokens 4 * quad .. 4 * quad + 3 of a draw.
constexpr PhiloxCounter draw_counter(std::uint64_t request,
                                     std::int64_t position,
                                     std::uint32_t quad) {
  return {{quad, static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(request),
           static_cast<std::uint32_t>(request >> 32)}};
}

// ---- exponentials and logarithms ---------------------------------------------------------------
// The polynomials of Cephes' expf and logf (Moshier), within 2 ulps.

constexpr float kLn2High = 0.693359375F;  // 10 bits: its product with an exponent is exact
constexpr float kLn2Low = -2.12194440e-4F;

// ln of 2^exponent (1 + f), for 1 + f from sqrt(1/2) to sqrt(2).
constexpr float ln_of_parts(float f, float exponent) {
  const float square = f * f;
  float p = 7.0376836292e-2F;
  p = p * f - 1.1514610310e-1F;
  p = p * f + 1.1676998740e-1F;
  p = p * f - 1.2420140846e-1F;
  p = p * f + 1.4249322787e-1F;
  p = p * f - 1.6668057665e-1F;
  p = p * f + 2.0000714765e-1F;
  p = p * f - 2.4999993993e-1F;
  p = p * f + 3.3333331174e-1F;
  const float tail = p * f * square + exponent * kLn2Low - 0.5F * square;
  return (f + tail) + exponent * kLn2High;
}

// The natural logarithm of a normal number above 0.
constexpr float ln(float x) {
  constexpr std::int32_t kRootHalf = 0x3F3504F3;
  const auto bits = std::bit_cast<std::int32_t>(x) - kRootHalf;
  const auto mantissa = std::bit_cast<float>((bits & 0x007FFFFF) + kRootHalf);
  return ln_of_parts(mantissa - 1, static_cast<float>(bits >> 23));
}

// e^x for x <= 0; 0 below -64.
constexpr float exp_of_negative(float x) {
  const float bounded = x > -64.0F ? x : -64.0F;
  const auto exponent = static_cast<std::int32_t>(bounded * 1.44269504F - 0.5F);
  const auto n = static_cast<float>(exponent);
  const float r = bounded - n * kLn2High - n * kLn2Low;
  float p = 1.9875691500e-4F;
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  const float power = p * (r * r) + r + 1;
  return x > -64.0F ? power * std::bit_cast<float>((exponent + 127) << 23) : 0.0F;
}

// ---- noise -------------------------------------------------------------------------------------

// -ln(-ln(1 - w)), w = (bits/2 + 1/2) / 2^31: the Gumbel distribution. The token of the largest sum
// of logit and noise is a draw from the softmax (Gumbel-max).
constexpr float gumbel_noise(std::uint32_t bits) {
  constexpr float kStep = 4.656612873077393e-10F;  // 2^-31
  const auto numerator = static_cast<std::int32_t>(bits >> 1);
  const float w = static_cast<float>(numerator) * kStep + kStep / 2;
  const float rest = static_cast<float>(0x7FFFFFFF - numerator) * kStep + kStep / 2;  // 1 - w
  const float of_rest = ln(rest);
  const float of_small = ln_of_parts(-w, 0);  // 1 - w itself has lost most bits of a small w
  return -ln(-(w < 0.25F ? of_small : of_rest));
}
constexpr float kMostNoise = 22.2F;  // -ln 2^-32 = 22.18

// ---- order and mass ----------------------------------------------------------------------------

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Maps NaN to -inf, which is never drawn, and -0 to 0.
constexpr float usable(float logit) {
  return logit == logit ? logit + 0.0F : kMinusInfinity;
}

// Orders tokens from the smallest logit to the largest, and tokens of equal logits from the largest
// id to the smallest: no two tokens of a row are equal.
constexpr std::uint32_t order_of(float logit) {
  const auto bits = std::bit_cast<std::uint32_t>(logit);
  return bits & 0x80000000U ? ~bits : bits | 0x80000000U;
}
constexpr std::uint64_t rank_key(float logit, std::int64_t token) {
  return std::uint64_t{order_of(logit)} << 32 | ~static_cast<std::uint32_t>(token);
}
constexpr float logit_of_key(std::uint64_t key) {
  const auto order = static_cast<std::uint32_t>(key >> 32);
  return std::bit_cast<float>(order & 0x80000000U ? order & 0x7FFFFFFFU : ~order);
}
constexpr std::int64_t token_of_key(std::uint64_t key) {
  return std::int64_t{~static_cast<std::uint32_t>(key)};
}

constexpr float below_maximum(float logit, float maximum) {
  return logit == maximum ? 0.0F : logit - maximum;  // also where both are infinite
}

// e^(logit - maximum) in steps of 2^-43: a row of up to 2^20 tokens has a sum below 2^63.
constexpr int kMassBits = 43;
constexpr double kWholeMass = 8796093022208.0;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 20;
constexpr std::uint64_t mass_of(float below) {
  return static_cast<std::uint64_t>(exp_of_negative(below) * static_cast<float>(kWholeMass));
}
// min_p keeps a token whose mass is at least least_mass; top_p keeps it if all tokens of larger
// rank have less than mass_limit together.
constexpr std::uint64_t ceiling(double mass) {
  const auto whole = static_cast<std::uint64_t>(mass);
  return whole + (static_cast<double>(whole) < mass ? 1 : 0);
}
constexpr std::uint64_t least_mass(double min_p) {
  return ceiling(min_p * kWholeMass);
}
constexpr std::uint64_t mass_limit(double top_p, std::uint64_t total) {
  return ceiling(top_p * static_cast<double>(total));
}
constexpr float processed_log_prob(float below, std::uint64_t total) {
  return below - ln(static_cast<float>(total) * static_cast<float>(1 / kWholeMass));
}

// ---- penalties ---------------------------------------------------------------------------------

struct Penalties {
  float repetition = 1;
  float presence = 0;
  float frequency = 0;
};

// vLLM's apply_penalties for a token that occurs `count` times in the answer, or (0) in the prompt
// alone.
constexpr float penalized(float logit, const Penalties& penalties, std::int32_t count) {
  const float repeated = logit > 0 ? logit / penalties.repetition : logit * penalties.repetition;
  const float counted = repeated - penalties.frequency * static_cast<float>(count);
  return count > 0 ? counted - penalties.presence : counted;
}

}  // namespace ferry::rollout
