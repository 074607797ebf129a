#include "rollout/step_inputs.h"

#include <ATen/ops/zeros.h>

#include <span>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "rollout/kernels/step_copies.h"

namespace ferry::rollout {
namespace {

constexpr std::int64_t kAlignment = 16;

std::int64_t bytes_of_shape(std::span<const std::int64_t> sizes, at::ScalarType dtype) {
  auto bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
  for (const auto size : sizes) bytes *= size;
  return bytes;
}

}  // namespace

StepInputs::StepInputs(std::int64_t capacity, at::Device device)
    : device_(at::zeros({bytes_of(capacity)}, at::TensorOptions(at::kByte).device(device))) {
  for (auto& host : hosts_)
    host = device.is_cuda()
               ? at::zeros(device_.sizes(), at::TensorOptions(at::kByte).pinned_memory(true))
               : device_;
}

std::int64_t StepInputs::bytes_of(std::int64_t bytes) {
  return distckpt::round_up(bytes, kAlignment);
}

void StepInputs::begin() {
  side_ = 1 - side_;
  used_ = 0;
}

StepInputs::Array StepInputs::add(std::initializer_list<std::int64_t> sizes, at::ScalarType dtype) {
  const auto bytes = bytes_of_shape(sizes, dtype);
  require(used_ + bytes <= device_.size(0), ErrorKind::kBug,
          "inputs of a step: {} bytes and {} of {}", used_, bytes, device_.size(0));
  Array array{.host = hosts_[side_].mutable_data_ptr<std::uint8_t>() + used_,
              .offset = used_,
              .dtype = dtype,
              .sizes = sizes};
  if (used_ == 0) num_tokens_ = *sizes.begin();
  used_ += bytes_of(bytes);
  return array;
}

void StepInputs::upload(const at::Tensor& drawn) const {
  if (device_.is_cuda()) upload_step(hosts_[side_], device_, used_, num_tokens_, drawn);
}

at::Tensor StepInputs::on_device(const Array& array) const {
  const auto bytes = bytes_of_shape(array.sizes, array.dtype);
  return device_.narrow(0, array.offset, bytes).view(array.dtype).view(array.sizes);
}

}  // namespace ferry::rollout
