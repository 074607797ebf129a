#include "models/tensor_parallel/parameters.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::models {
namespace {

constexpr auto kNowhere = std::numeric_limits<std::size_t>::max();

at::IntArrayRef sizes(const distckpt::Shape& shape) {
  return {shape.begin(), shape.end()};
}

at::Tensor empty_of(std::vector<std::int64_t> shape, at::ScalarType dtype, at::Device device) {
  return at::empty(shape, at::TensorOptions().dtype(dtype).device(device));
}

}  // namespace

at::ScalarType scalar_type(distckpt::DType dtype) {
  switch (dtype) {
    case distckpt::DType::kBF16:
      return at::kBFloat16;
    case distckpt::DType::kF16:
      return at::kHalf;
    case distckpt::DType::kF32:
      return at::kFloat;
    case distckpt::DType::kF64:
      return at::kDouble;
    default:
      throw Error(ErrorKind::kLayout,
                  fmt::format("parameters of {} are not computed with", short_name(dtype)));
  }
}

Parameters::Parameters(std::vector<ParameterSpec> layout, at::Device device) : device_(device) {
  for (auto& spec : layout) {
    const bool added = index_.emplace(spec.key, parameters_.size()).second;
    require(added, ErrorKind::kBug, "the layout has {} twice", spec.key);
    parameters_.push_back({.spec = std::move(spec)});
  }
  leaf_of_.resize(parameters_.size(), {kNowhere, 0});
}

std::size_t Parameters::find(const std::string& key) const {
  const auto found = index_.find(key);
  require(found != index_.end(), ErrorKind::kBug, "the layout has no {}", key);
  require(leaf_of_[found->second].first == kNowhere, ErrorKind::kBug, "{} was taken before", key);
  return found->second;
}

at::Tensor Parameters::part_of(const Leaf& leaf, std::size_t index) const {
  const auto& spec = parameters_[leaf.parameters[index]].spec;
  return leaf.value.dim() == spec.shape.rank()
             ? leaf.value.detach()
             : leaf.value.detach().select(0, static_cast<std::int64_t>(index));
}

void Parameters::add_leaf(at::Tensor value,
                          std::vector<std::size_t> parameters,
                          GradientOverTp gradient) {
  const Leaf leaf{.value = value, .parameters = parameters, .gradient = gradient};
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    auto& parameter = parameters_[parameters[i]];
    leaf_of_[parameters[i]] = {leaves_.size(), static_cast<std::int64_t>(i)};
    parameter.value = part_of(leaf, i);
  }
  mark_unloaded(leaf);
  value.requires_grad_(parameters_[parameters[0]].spec.trained);
  leaves_.push_back(leaf);
}

void Parameters::mark_unloaded(const Leaf& leaf) const {
  leaf.value.detach().fill_(std::numeric_limits<double>::quiet_NaN());
  for (const auto index : leaf.parameters) {
    const auto& [spec, value] = parameters_[index];
    if (spec.vocab < 0) continue;
    const auto padding = std::max<std::int64_t>(spec.boxes[0].offset[0], spec.vocab);
    const auto first = padding - spec.boxes[0].offset[0];
    if (first < spec.shape[0]) value.narrow(0, first, spec.shape[0] - first).zero_();
  }
}

// Tensors keep their storage, which loses its memory: all views see the new memory later.
void Parameters::release() {
  for (const auto& leaf : leaves_) {
    const auto& storage = leaf.value.storage();
    if (storage.nbytes() == 0) continue;  // that of another leaf
    released_.emplace_back(storage, storage.nbytes());
    auto* const memory = storage.unsafeGetStorageImpl();
    memory->set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
    memory->set_nbytes(0);
  }
}

void Parameters::restore() {
  for (const auto& [storage, bytes] : std::exchange(released_, {})) {
    auto* const memory = storage.unsafeGetStorageImpl();
    memory->set_data_ptr_noswap(memory->allocator()->allocate(bytes));
    memory->set_nbytes(bytes);
  }
  for (const auto& leaf : leaves_) mark_unloaded(leaf);
}

void Parameters::rebind(std::size_t leaf, const at::Tensor& memory) {
  const auto& bound = leaves_.at(leaf);
  const auto moved = memory.view(bound.value.sizes());
  moved.copy_(bound.value.detach());
  bound.value.set_data(moved);
  for (std::size_t i = 0; i < bound.parameters.size(); ++i)
    parameters_[bound.parameters[i]].value = part_of(bound, i);
}

at::Tensor Parameters::take(const std::string& key, GradientOverTp gradient) {
  const auto index = find(key);
  const auto& spec = parameters_[index].spec;
  add_leaf(empty_of(sizes(spec.shape).vec(), scalar_type(spec.dtype), device_), {index}, gradient);
  return leaves_.back().value;
}

at::Tensor Parameters::take_if(const std::string& key, GradientOverTp gradient) {
  return has(key) ? take(key, gradient) : at::Tensor();
}

at::Tensor Parameters::value_if(const std::string& key) const {
  const auto found = index_.find(key);
  return found == index_.end() ? at::Tensor() : parameters_[found->second].value;
}

at::Tensor Parameters::take_stacked(const std::vector<std::string>& keys) {
  std::vector<std::size_t> indices;
  for (const auto& key : keys) indices.push_back(find(key));
  require(std::ranges::is_sorted(indices), ErrorKind::kBug, "{} is stacked on what comes behind it",
          keys.back());
  const auto& spec = parameters_[indices.at(0)].spec;
  auto shape = sizes(spec.shape).vec();
  shape.insert(shape.begin(), static_cast<std::int64_t>(keys.size()));
  add_leaf(empty_of(shape, scalar_type(spec.dtype), device_), std::move(indices),
           GradientOverTp::kWhole);
  return leaves_.back().value;
}

void Parameters::check_all_taken() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    require(leaf_of_[i].first != kNowhere, ErrorKind::kBug, "no module took {}",
            parameters_[i].spec.key);
  }
}

at::Tensor Parameters::gradient(std::size_t parameter) const {
  const auto [leaf, index] = leaf_of_[parameter];
  const auto& whole = leaves_[leaf].value.grad();
  if (!whole.defined()) return {};
  return whole.dim() == parameters_[parameter].spec.shape.rank() ? whole : whole.select(0, index);
}

std::vector<std::string> Parameters::not_finite() const {
  std::vector<std::string> keys;
  for (const auto& parameter : parameters_) {
    if (!parameter.value.isfinite().all().item<bool>()) keys.push_back(parameter.spec.key);
  }
  return keys;
}

std::vector<distckpt::LocalShard> Parameters::sharded_state_dict() const {
  std::vector<std::shared_ptr<at::Tensor>> owners;
  for (const auto& leaf : leaves_)
    owners.push_back(std::make_shared<at::Tensor>(leaf.value.detach()));
  std::vector<distckpt::LocalShard> shards;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto& parameter = parameters_[i];
    std::int64_t row = 0;
    for (auto& tensor : parameter.spec.sharded_tensors()) {
      const auto part = parameter.value.narrow(0, row, tensor.local_shape[0]);
      row += tensor.local_shape[0];
      shards.push_back({.tensor = std::move(tensor),
                        .data = static_cast<std::byte*>(part.data_ptr()),
                        .strides = distckpt::Dims(part.strides()),
                        .device = part.is_cuda() ? part.get_device() : -1,
                        .owner = owners[leaf_of_[i].first]});
    }
  }
  return shards;
}

std::vector<std::byte*> Parameters::owner_addresses() const {
  std::vector<std::byte*> addresses;
  for (const auto& [leaf, index] : leaf_of_) {
    if (index == 0) addresses.push_back(static_cast<std::byte*>(leaves_[leaf].value.data_ptr()));
  }
  return addresses;
}

}  // namespace ferry::models
