#include "trainer/plan/device_table.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace ferry::trainer {
namespace {

constexpr std::int64_t mib(std::int64_t count) {
  return count << 20;
}

// A name that begins with another stands before it. Operations without sparsity; half of NVLink's
// and PCIe's rates, which data sheets give for both directions.
constexpr std::array<DeviceSpec, 8> kDevices{{
    {"GB200", mib(188'416), 2500e12, 8.0e12, 900e9, 225e9},
    {"B200", mib(182'632), 2250e12, 8.0e12, 900e9, 55e9},
    {"H100", mib(81'000), 989e12, 3.35e12, 450e9, 55e9},
    {"H200", mib(143'156), 989e12, 4.8e12, 450e9, 55e9},
    {"H800", mib(81'000), 989e12, 3.35e12, 200e9, 55e9},
    {"A100", mib(81'050), 312e12, 2.04e12, 300e9, 25e9},
    {"A800", mib(81'050), 312e12, 2.04e12, 200e9, 25e9},
    {"H20", mib(97'280), 148e12, 4.0e12, 450e9, 55e9},
}};

}  // namespace

std::optional<DeviceSpec> find_device(std::string_view name) {
  const auto same = [](unsigned char a, unsigned char b) {
    return std::toupper(a) == std::toupper(b);
  };
  for (const auto& device : kDevices) {
    if (!std::ranges::search(name, device.name, same).empty()) return device;
  }
  return std::nullopt;
}

std::vector<std::string_view> device_names() {
  std::vector<std::string_view> names;
  for (const auto& device : kDevices) names.push_back(device.name);
  return names;
}

}  // namespace ferry::trainer
