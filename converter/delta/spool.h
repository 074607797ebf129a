// A file without a name, where encoded pieces of many tensors wait until their sizes are known: a
// safetensors file states them first.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "distckpt/base/dtype.h"
#include "distckpt/storage/file_io.h"

namespace ferry::converter {

// Bytes in the spool.
struct Extent {
  std::int64_t offset = 0;
  std::int64_t size = 0;
};

class Spool {
 public:
  // In `folder`, on whose file system there has to be room. Throws Error(kIo).
  explicit Spool(const std::filesystem::path& folder);

  Extent append(std::span<const std::byte> bytes);  // thread-safe
  void read(const Extent& extent, std::int64_t offset, std::span<std::byte> into) const;

 private:
  distckpt::Descriptor fd_;
  std::atomic<std::int64_t> end_ = 0;
};

// A tensor of a file to be written: one dimension, a head, then pieces of the spool.
struct SpooledTensor {
  std::string name{};
  distckpt::DType dtype = distckpt::DType::kU8;
  std::vector<std::byte> head{};
  std::vector<Extent> pieces{};
};

// Writes a safetensors file, durably; its size.
std::int64_t write_spooled(const std::filesystem::path& path,
                           const std::vector<SpooledTensor>& tensors,
                           const std::map<std::string, std::string>& metadata,
                           const Spool& spool);

}  // namespace ferry::converter
