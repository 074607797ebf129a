// Digests of tensors that pass by in stretches, in any order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "distckpt/elements/digest.h"
#include "distckpt/plan/tensor_map.h"

namespace ferry::converter {

class SeenBlocks {
 public:
  explicit SeenBlocks(const std::vector<distckpt::ModelTensor>& tensors);

  // A stretch, which begins at a block; each passes by once. The tensor's digest if it was the last
  // one of it. Thread-safe.
  std::optional<distckpt::Digest> add(std::uint32_t tensor,
                                      std::int64_t offset,
                                      std::span<const std::byte> bytes);

 private:
  struct Blocks {
    distckpt::DType dtype = distckpt::DType::kBF16;
    distckpt::Shape shape{};
    std::vector<distckpt::Digest> digests{};
    std::size_t missing = 0;
  };
  std::vector<Blocks> tensors_;
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();
};

}  // namespace ferry::converter
