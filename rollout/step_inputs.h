// The numbers of a step that the host writes and the device reads. They are contiguous, so that one
// copy uploads all, in memory that never moves: arrays of the same shapes have the same addresses,
// which a CUDA graph needs.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace ferry::rollout {

class StepInputs {
 public:
  // Memory of the host until upload(), not initialized.
  struct Array {
    void* host = nullptr;
    std::int64_t offset = 0;
    at::ScalarType dtype = at::kByte;
    std::vector<std::int64_t> sizes{};

    template <typename T>
    T* data() const {
      return static_cast<T*>(host);
    }
  };

  StepInputs(std::int64_t capacity, at::Device device);

  // Bytes that an array of so many takes, with its padding.
  static std::int64_t bytes_of(std::int64_t bytes);

  // Begins a step. The previous step's arrays may still be in transfer, earlier ones must not.
  void begin();
  Array add(std::initializer_list<std::int64_t> sizes, at::ScalarType dtype);
  // Copies all arrays since begin() to the device. The first array is tokens, int64; a token below
  // 0, -1 - i, becomes drawn[i], which the device may still be computing. On the host there are
  // none.
  void upload(const at::Tensor& drawn) const;
  at::Tensor on_device(const Array& array) const;

 private:
  // Two sides on the host: one is written while the other may still be in transfer.
  std::array<at::Tensor, 2> hosts_{};
  at::Tensor device_;
  std::size_t side_ = 0;
  std::int64_t used_ = 0;
  std::int64_t num_tokens_ = 0;
};

}  // namespace ferry::rollout
