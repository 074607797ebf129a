// Safetensors files as a test wants them, written by hand.
#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "distckpt/base/integers.h"
#include "distckpt/storage/file_io.h"

namespace ferry::support {

struct StoredTensor {
  std::string name{};
  std::string dtype = "F32";
  std::vector<std::int64_t> shape{};
  std::string bytes{};
};

template <typename T>
StoredTensor stored_tensor(const std::string& name,
                           const std::vector<std::int64_t>& shape,
                           const std::vector<T>& values,
                           const std::string& dtype = "F32") {
  return {.name = name,
          .dtype = dtype,
          .shape = shape,
          .bytes = {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)}};
}

// `metadata`: the members of __metadata__, JSON.
inline void write_safetensors(const std::filesystem::path& path,
                              const std::vector<StoredTensor>& tensors,
                              const std::string& metadata = "") {
  std::string header = fmt::format(R"({{"__metadata__": {{{}}})", metadata), bytes;
  for (const auto& tensor : tensors) {
    header += fmt::format(R"(, "{}": {{"dtype": "{}", "shape": [{}], "data_offsets": [{}, {}]}})",
                          tensor.name, tensor.dtype, fmt::join(tensor.shape, ", "), bytes.size(),
                          bytes.size() + tensor.bytes.size());
    bytes += tensor.bytes;
  }
  header += "}";
  header.resize(distckpt::round_up(header.size(), 8), ' ');
  const auto length = static_cast<std::uint64_t>(header.size());
  distckpt::write_text(path,
                       std::string(reinterpret_cast<const char*>(&length), 8) + header + bytes);
}

}  // namespace ferry::support
