#include "trainer/plan/device_table.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cctype>

namespace ferry::trainer {
namespace {

constexpr std::int64_t mib(std::int64_t count) {
  return count << 20;
}

// Operations without sparsity; half of NVLink's and PCIe's rates, which data sheets give for both
// directions.
const auto& known_devices() {
  static const std::array<DeviceSpec, 11> devices{{
      {"GB300", mib(284'208), 2500e12, 8.0e12, 900e9, 225e9},
      {"GB200", mib(188'416), 2500e12, 8.0e12, 900e9, 225e9},
      {"B300", mib(275'040), 2250e12, 8.0e12, 900e9, 55e9},
      {"B200", mib(182'632), 2250e12, 8.0e12, 900e9, 55e9},
      {"GH200", mib(97'871), 989e12, 4.0e12, 450e9, 450e9},
      {"H100", mib(81'000), 989e12, 3.35e12, 450e9, 55e9},
      {"H200", mib(143'156), 989e12, 4.8e12, 450e9, 55e9},
      {"H800", mib(81'000), 989e12, 3.35e12, 200e9, 55e9},
      {"A100", mib(81'050), 312e12, 2.04e12, 300e9, 25e9},
      {"A800", mib(81'050), 312e12, 2.04e12, 200e9, 25e9},
      {"H20", mib(97'280), 148e12, 4.0e12, 450e9, 55e9},
  }};
  return devices;
}

}  // namespace

std::optional<DeviceSpec> find_device(std::string_view name) {
  const auto same = [](unsigned char a, unsigned char b) {
    return std::toupper(a) == std::toupper(b);
  };
  const auto is_word = [&](std::size_t begin, std::size_t size) {
    const auto is_part = [&](std::size_t at) {
      return at < name.size() && std::isalnum(static_cast<unsigned char>(name[at])) != 0;
    };
    return (begin == 0 || !is_part(begin - 1)) && !is_part(begin + size);
  };
  for (const auto& device : known_devices()) {
    const auto size = device.name.size();
    for (std::size_t begin = 0; begin + size <= name.size(); ++begin)
      if (std::ranges::equal(name.substr(begin, size), device.name, same) && is_word(begin, size))
        return device;
  }
  return std::nullopt;
}

std::vector<std::string_view> device_names() {
  std::vector<std::string_view> names;
  for (const auto& device : known_devices()) names.push_back(device.name);
  return names;
}

DeviceSpec slowest_of(std::span<const DeviceSpec> devices) {
  auto slowest = devices.front();
  std::vector<std::string> names;
  for (const auto& device : devices) {
    for (const auto figure : {&DeviceSpec::flops, &DeviceSpec::memory_rate, &DeviceSpec::link_rate,
                              &DeviceSpec::host_rate})
      slowest.*figure = std::min(slowest.*figure, device.*figure);
    slowest.memory = std::min(slowest.memory, device.memory);
    if (std::ranges::find(names, device.name) == names.end()) names.push_back(device.name);
  }
  slowest.name = fmt::format("{}", fmt::join(names, " or "));
  return slowest;
}

}  // namespace ferry::trainer
