#include "cli/torch/device_rates.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "distckpt/base/stopwatch.h"

namespace ferry::cli {
namespace device_rates_test {

double best_seconds(const std::function<void()>& body) {
  double best = 1e30;
  for (int i = 0; i < 4; ++i) {
    const distckpt::Stopwatch stopwatch;
    body();
    best = std::min(best, stopwatch.seconds());
  }
  return best;
}

// Within a factor that other work of the host does not exceed, and a wrong unit does.
TEST(DeviceRates, AreThoseOfACopyAndOfAProduct) {
  const auto rates = measure_rates(at::kCPU, distckpt::DType::kF32);
  const std::int64_t bytes = std::int64_t{128} << 20;
  const auto from = at::zeros({bytes}, at::kByte);
  auto to = at::empty_like(from);
  const auto copied = static_cast<double>(2 * bytes) / best_seconds([&] { to.copy_(from); });
  EXPECT_GT(rates.bytes_per_second, copied / 3);
  EXPECT_LT(rates.bytes_per_second, copied * 8);
  const auto a = at::randn({768, 768});
  const auto multiplied = 2 * 768.0 * 768 * 768 / best_seconds([&] { at::mm(a, a); });
  EXPECT_GT(rates.flops_per_second, multiplied / 6);
  EXPECT_LT(rates.flops_per_second, multiplied * 6);
}

}  // namespace device_rates_test
}  // namespace ferry::cli
