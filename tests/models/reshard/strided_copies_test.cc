// On the host, and on a GPU where there is one.
#include "models/reshard/strided_copies.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "tests/support/random_boxes.h"
#include "tests/support/seed_blocks.h"

namespace ferry::models {
namespace strided_copies_test {

using distckpt::Dims;
using support::Random;

using Device = at::DeviceType;
using DeviceAndBlock = std::tuple<at::DeviceType, int>;  // of seeds
constexpr int kNumBlocks = 10;

template <typename Param>
class OnDevice : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    if (device_.is_cuda() && !at::hasCUDA()) GTEST_SKIP() << "no GPU";
  }
  at::TensorOptions bytes() const { return at::TensorOptions().dtype(at::kByte).device(device_); }

  static Device type_of(Device device) { return device; }
  static Device type_of(DeviceAndBlock param) { return std::get<Device>(param); }
  static std::string name_of(const testing::TestParamInfo<Param>& info) {
    const std::string device = type_of(info.param) == at::kCPU ? "host" : "cuda";
    if constexpr (std::is_same_v<Param, DeviceAndBlock>)
      return fmt::format("{}_{}", device, std::get<int>(info.param));
    return device;
  }

  const at::Device device_ =
      type_of(this->GetParam()) == at::kCUDA ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU);
};

class StridedCopiesOn : public OnDevice<Device> {
 public:
  using OnDevice::name_of;
};
INSTANTIATE_TEST_SUITE_P(Devices,
                         StridedCopiesOn,
                         testing::Values(at::kCPU, at::kCUDA),
                         [](const auto& made) { return StridedCopiesOn::name_of(made); });

class RandomStridedCopiesOn : public OnDevice<DeviceAndBlock> {
 public:
  using OnDevice::name_of;
};
INSTANTIATE_TEST_SUITE_P(Devices,
                         RandomStridedCopiesOn,
                         testing::Combine(testing::Values(at::kCPU, at::kCUDA),
                                          testing::Range(0, kNumBlocks)),
                         [](const auto& made) { return RandomStridedCopiesOn::name_of(made); });

// A tensor of elements of so many bytes, in memory that begins anywhere and lies in any order of
// its dimensions.
struct Laid {
  at::Tensor memory{};  // all of it
  at::Tensor value{};   // [shape..., element bytes]
};
Laid lay(Random& random,
         const Dims& shape,
         std::int64_t element,
         const at::TensorOptions& options) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(shape.rank()));
  for (std::size_t d = 0; d < order.size(); ++d) order[d] = static_cast<std::int64_t>(d);
  if (random.chance(50)) random.shuffle(order);
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> back(order.size());
  for (std::size_t d = 0; d < order.size(); ++d) {
    sizes.push_back(shape[static_cast<int>(order[d])]);
    back[static_cast<std::size_t>(order[d])] = static_cast<std::int64_t>(d);
  }
  sizes.push_back(element);
  back.push_back(static_cast<std::int64_t>(back.size()));
  const auto first = random.between(0, 5) * element;
  Laid laid{.memory = at::randint(0, 256, {first + shape.product() * element}, options)};
  laid.value = laid.memory.narrow(0, first, shape.product() * element).view(sizes).permute(back);
  return laid;
}

BoxEnd end_of(std::int32_t memory, const Laid& laid, const distckpt::Box& box, bool staged) {
  BoxEnd end{.memory = staged ? -1 : memory, .offset = staged ? laid.value.storage_offset() : 0};
  for (int d = 0; d < box.rank(); ++d) {
    end.strides.push_back(laid.value.stride(d));
    end.offset += box.offset[d] * laid.value.stride(d);
  }
  return end;
}

at::Tensor part_of(at::Tensor value, const distckpt::Box& box) {
  for (int d = 0; d < box.rank(); ++d) value = value.narrow(d, box.offset[d], box.size[d]);
  return value;
}

TEST_P(RandomStridedCopiesOn, AreTheCopiesOfEachBox) {
  support::for_each_seed(std::get<1>(GetParam()), kNumBlocks, 1, 60, [&](std::uint64_t seed) {
    Random random(seed);
    std::vector<Laid> sources;
    std::vector<Laid> targets;
    std::vector<at::Tensor> expected;  // the targets' memory
    std::vector<BoxCopy> copies;
    std::vector<std::byte*> addresses;
    const bool large = seed % 10 == 0;
    const auto count = static_cast<int>(random.between(1, 5));
    for (int i = 0; i < count; ++i) {
      const auto element = std::int64_t{1} << random.between(0, 3);
      const auto shape =
          large ? support::random_shape(random, 2, 200, 400)
                : support::random_shape(random, static_cast<int>(random.between(1, 5)), 1, 9);
      sources.push_back(lay(random, shape, element, bytes()));
      targets.push_back(lay(random, shape, element, bytes()));
      const auto& from = sources.back();
      const auto& to = targets.back();
      expected.push_back(to.memory.clone());
      const auto wanted = expected.back().as_strided(to.value.sizes(), to.value.strides(),
                                                     to.value.storage_offset());
      const bool staged = i == 0 && random.chance(50);  // its target lies in the staging memory
      for (const auto& box : support::random_tiling(random, shape, 4)) {
        if (random.chance(20)) continue;
        part_of(wanted, box).copy_(part_of(from.value, box));
        copies.push_back({.size = box.size,
                          .element_size = element,
                          .from = end_of(2 * i, from, box, false),
                          .to = end_of(2 * i + 1, to, box, staged)});
      }
      addresses.push_back(static_cast<std::byte*>(from.value.data_ptr()));
      addresses.push_back(static_cast<std::byte*>(to.value.data_ptr()));
    }
    const StridedCopies all(copies, device_);
    all.run(Addresses(addresses, device_), static_cast<std::byte*>(targets[0].memory.data_ptr()));
    for (std::size_t i = 0; i < targets.size(); ++i)
      EXPECT_TRUE(at::equal(targets[i].memory, expected[i])) << i;
  });
}

TEST_P(StridedCopiesOn, LeaveAloneWhatIsInPlace) {
  const auto memory = at::randint(0, 256, {64}, bytes());
  const auto before = memory.clone();
  const BoxEnd end{.memory = 0, .strides = {1}};
  const StridedCopies copies({{.size = {64}, .element_size = 1, .from = end, .to = end}}, device_);
  copies.run(Addresses({static_cast<std::byte*>(memory.data_ptr())}, device_));
  EXPECT_TRUE(at::equal(memory, before));
}

}  // namespace strided_copies_test
}  // namespace ferry::models
