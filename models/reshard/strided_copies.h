// Copies many boxes at once between numbered memories, as a round of a reshard packs, unpacks or
// moves them within a rank. Made once from sizes and strides; addresses come with each run. On a
// GPU one kernel copies all boxes, driven by a table that stays on the device: 80 bytes for each
// box and 4 for each 32 KiB that are copied.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "distckpt/base/box.h"
#include "models/kernels/cuda/strided_box.h"

namespace ferry::models {

// One side of a copy. Offset and strides are in bytes; memory -1 is the staging memory of a run.
struct BoxEnd {
  std::int32_t memory = -1;
  std::int64_t offset = 0;
  distckpt::Dims strides{};
};

struct BoxCopy {
  distckpt::Dims size{};  // in elements
  std::int64_t element_size = 0;
  BoxEnd from{};
  BoxEnd to{};
};

// The address of every memory, by its number.
class Addresses {
 public:
  Addresses() = default;
  Addresses(std::vector<std::byte*> addresses, at::Device device);

  const std::vector<std::byte*>& host() const { return host_; }
  // The address of the first element of an end that is not in the staging memory.
  std::byte* of(const BoxEnd& end) const {
    return host_[static_cast<std::size_t>(end.memory)] + end.offset;
  }
  const at::Tensor& device() const { return device_; }  // [memories] int64; on a GPU alone

 private:
  std::vector<std::byte*> host_;
  at::Tensor device_;
};

class StridedCopies {
 public:
  StridedCopies() = default;
  // Throws Error(kBug) for a box of 2 GiB or more.
  StridedCopies(const std::vector<BoxCopy>& copies, at::Device device);

  // Copies all boxes; on a GPU enqueues the copy on the current stream. `staging` is memory -1.
  // Boxes must not overlap the targets of others. A box with the same address on both sides is left
  // alone.
  void run(const Addresses& addresses, std::byte* staging = nullptr) const;

 private:
  std::vector<BoxCopy> copies_;  // on the host alone
  at::Tensor boxes_;             // [boxes, sizeof(StridedBox)]; on a GPU alone, like the next
  at::Tensor box_of_tile_;       // [tiles] int32
};

}  // namespace ferry::models
