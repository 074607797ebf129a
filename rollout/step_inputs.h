// The numbers of a step that the host writes and the device reads. They lie one behind another, so
// that all go up at once, in memory that never moves: arrays of the same shapes lie in the same
// places, as a CUDA graph wants them.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <vector>

namespace ferry::rollout {

class StepInputs {
 public:
  // On the host until upload(), of any content.
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

  // Bytes that an array takes.
  static std::int64_t bytes_of(std::int64_t bytes);

  // A step begins: the arrays of the one before it may still be on their way, those of the one
  // before that are not.
  void begin();
  Array add(std::initializer_list<std::int64_t> sizes, at::ScalarType dtype);
  // All arrays since begin(). The first of them is tokens, int64: one below 0, -1 - i, becomes
  // drawn[i], which the device may still be computing. On the host there is none such.
  void upload(const at::Tensor& drawn) const;
  at::Tensor on_device(const Array& array) const;

 private:
  // Of two sides on the host one is written while the other may still be on its way.
  std::array<at::Tensor, 2> hosts_{};
  at::Tensor device_;
  std::size_t side_ = 0;
  std::int64_t used_ = 0;
  std::int64_t num_tokens_ = 0;
};

}  // namespace ferry::rollout
