// The devices that runs are planned for: bytes, and rates of the makers' data sheets.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::trainer {

// Rates are a second, and of a link in each direction. 0: not known.
struct DeviceSpec {
  std::string name{};
  std::int64_t memory = 0;  // bytes that CUDA reports
  double flops = 0;         // dense, in bf16
  double memory_rate = 0;   // bytes of its own memory
  double link_rate = 0;     // bytes to other devices of the host
  double host_rate = 0;     // bytes to the host's memory
  bool on_host = false;     // the host itself
};

// The device whose name is a word of CUDA's, "NVIDIA H100 80GB HBM3", in any case of letters;
// nothing for one that is not known.
std::optional<DeviceSpec> find_device(std::string_view name);

std::vector<std::string_view> device_names();

// The device that a run on several is planned for: of each figure the least, so that ranks that
// agree on `devices` choose alike. Its name has those of all, "H20 or H200".
DeviceSpec slowest_of(std::span<const DeviceSpec> devices);

}  // namespace ferry::trainer
