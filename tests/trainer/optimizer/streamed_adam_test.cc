#include "trainer/optimizer/streamed_adam.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>

#include "models/device/device.h"
#include "models/device/host_memory.h"

namespace ferry::trainer {
namespace streamed_adam_test {

struct Dtypes {
  at::ScalarType param = at::kBFloat16;
  at::ScalarType grad = at::kFloat;
  at::ScalarType exp_avg = at::kFloat;
  at::ScalarType exp_avg_sq = at::kFloat;
};

const std::vector<Dtypes> kDtypes{{},
                                  {.param = at::kFloat},
                                  {.grad = at::kBFloat16},
                                  {.exp_avg = at::kBFloat16},
                                  {.exp_avg = at::kBFloat16, .exp_avg_sq = at::kBFloat16}};

AdamTensors random_shard(std::int64_t elements, const Dtypes& dtypes) {
  AdamTensors shard{.grad = at::randn({elements}).to(dtypes.grad),
                    .master = at::randn({elements}),
                    .exp_avg = at::randn({elements}).to(dtypes.exp_avg),
                    .exp_avg_sq = at::rand({elements}).to(dtypes.exp_avg_sq),
                    .decays = at::arange(elements / 64).remainder(3).ne(0).to(at::kByte)};
  if (dtypes.param != at::kFloat) shard.param = at::empty({elements}, dtypes.param);
  return shard;
}

at::Tensor on_host(const at::Tensor& x, at::Device device) {
  auto bytes = models::host_bytes(static_cast<std::int64_t>(x.nbytes()), device);
  auto copy = bytes.view(x.scalar_type());
  copy.copy_(x);
  return copy;
}

// Everything but the state on the device; the state pinned on the host or there as well. A master
// that is the parameter stays there.
AdamTensors placed(const AdamTensors& shard, at::Device device, bool streamed) {
  const auto state = [&](const at::Tensor& x) {
    return streamed ? on_host(x, device) : x.to(device, x.scalar_type(), false, /*copy=*/true);
  };
  const auto there = [&](const at::Tensor& x) {
    return x.defined() ? x.to(device, x.scalar_type(), false, /*copy=*/true) : x;
  };
  return {.grad = there(shard.grad),
          .master = shard.param.defined() ? state(shard.master) : there(shard.master),
          .exp_avg = state(shard.exp_avg),
          .exp_avg_sq = state(shard.exp_avg_sq),
          .param = there(shard.param),
          .decays = there(shard.decays)};
}

void expect_bytes_of_the_whole_update(at::Device device, int largest) {
  std::mt19937 random(7);
  const auto blocks = [&](int most) { return 64 * std::uniform_int_distribution(0, most)(random); };
  for (const auto& dtypes : kDtypes) {
    std::vector<AdamTensors> whole, streamed;
    for (int shard = 0; shard < 7; ++shard) {
      const auto values = random_shard(blocks(largest), dtypes);
      whole.push_back(placed(values, device, false));
      streamed.push_back(placed(values, device, true));
    }
    for (int step = 1; step <= 4; ++step) {  // one follows the other without waiting
      const AdamScalars scalars{.lr = 1e-2, .weight_decay = 0.1, .step = step, .grad_scale = 0.3};
      for (const auto& shard : whole) adam_update(shard, scalars);
      streamed_adam_update(streamed, scalars, 64 + blocks(largest / 4));
    }
    for (std::size_t i = 0; i < whole.size(); ++i) {
      EXPECT_TRUE(at::equal(whole[i].master.cpu(), streamed[i].master.cpu()));
      EXPECT_TRUE(at::equal(whole[i].exp_avg.cpu(), streamed[i].exp_avg.cpu()));
      EXPECT_TRUE(at::equal(whole[i].exp_avg_sq.cpu(), streamed[i].exp_avg_sq.cpu()));
      EXPECT_TRUE(!whole[i].param.defined() || at::equal(whole[i].param, streamed[i].param));
    }
  }
}

TEST(StreamedAdam, HasTheBytesOfTheWholeUpdate) {
  expect_bytes_of_the_whole_update(at::kCPU, 100);
}

TEST(StreamedAdam, CutsStretchesToTheLastElement) {
  std::vector<std::pair<std::int64_t, std::int64_t>> stretches;
  for_stretches(
      10, 4, [&](std::int64_t begin, std::int64_t size) { stretches.emplace_back(begin, size); });
  EXPECT_EQ(stretches,
            (std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 4}, {4, 4}, {8, 2}}));
}

TEST(StreamedAdamCuda, HasTheBytesOfTheWholeUpdate) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  expect_bytes_of_the_whole_update(at::Device(at::kCUDA, 0), 20000);
}

TEST(StreamedAdamCuda, TakesTheMemoryOfItsSlotsAlone) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const at::Device device(at::kCUDA, 0);
  const auto shard = placed(random_shard(std::int64_t{80} << 20, {}), device, true);
  models::synchronize(device);
  models::reset_peak_memory(device);
  const auto before = models::peak_memory(device);
  streamed_adam_update({shard}, {.lr = 1e-3});
  EXPECT_EQ(models::peak_memory(device) - before, kMaxStagingBytes);
}

TEST(HostBytesCuda, ArePinnedAndNoMoreThanAsked) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU";
  const auto bytes = models::host_bytes((std::int64_t{1} << 26) + 4097, at::Device(at::kCUDA, 0));
  EXPECT_TRUE(bytes.is_pinned());
  EXPECT_EQ(bytes.storage().nbytes(), (std::size_t{1} << 26) + 4097);
  EXPECT_FALSE(bytes.any().item<bool>());
}

}  // namespace streamed_adam_test
}  // namespace ferry::trainer
