// The parameters of a model on one rank: owns memory for each parameter of a layout and hands it to
// the modules by key. A parameter that was not loaded is NaN everywhere; its padding rows are
// zeros.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "distckpt/plan/sharded_tensor.h"
#include "models/spec/sharding.h"

namespace ferry::models {

struct Parameter {
  ParameterSpec spec{};
  at::Tensor
      value{};  // of the spec's shape; shares the memory of the leaf that modules compute with
};

// The gradient of a parameter that every tensor parallel rank holds whole, as it is on each of
// them.
enum class GradientOverTp : std::uint8_t {
  kWhole,    // the whole gradient, the same on each rank
  kPartial,  // a summand, of the rank's own tokens, heads or channels
};

// The tensor that a module computes with and an optimizer updates: one parameter, or one parameter
// of each expert.
struct Leaf {
  at::Tensor value{};                     // requires_grad where it is trained
  std::vector<std::size_t> parameters{};  // indices; several lie along the first dimension
  GradientOverTp gradient = GradientOverTp::kWhole;
};

class Parameters {
 public:
  Parameters(std::vector<ParameterSpec> layout, at::Device device);

  // Hands out the parameter `key`. Throws Error(kBug) if there is none, or it was taken before.
  at::Tensor take(const std::string& key, GradientOverTp gradient = GradientOverTp::kWhole);
  // Like take(), but returns an undefined tensor if there is no such parameter.
  at::Tensor take_if(const std::string& key, GradientOverTp gradient = GradientOverTp::kWhole);
  // Hands out the parameters of several keys, of one shape, in the layout's order, as one tensor
  // [keys, ...].
  at::Tensor take_stacked(const std::vector<std::string>& keys);
  bool has(const std::string& key) const { return index_.contains(key); }
  // The present value of a parameter, as a view of its leaf; an undefined tensor if there is none.
  at::Tensor value_if(const std::string& key) const;

  // Throws Error(kBug) naming a parameter that no module took.
  void check_all_taken() const;

  const std::vector<Parameter>& all() const { return parameters_; }
  const std::vector<Leaf>& leaves() const { return leaves_; }
  // Moves a leaf, its values too, into `memory` of as many elements; modules and all() follow.
  void rebind(std::size_t leaf, const at::Tensor& memory);
  // Gives the memory of all values back to the device. No module may compute with them before
  // restore(), which leaves them as if nothing had been loaded, at new addresses.
  void release();
  void restore();
  bool released() const { return !released_.empty(); }
  // The gradient of a parameter; undefined where there is none yet.
  at::Tensor gradient(std::size_t parameter) const;

  // Keys of parameters that hold a NaN or an infinity: damaged ones, or ones that were not loaded.
  std::vector<std::string> not_finite() const;

  // Every box of every parameter, with the address of its memory; its owner is the leaf's memory.
  std::vector<distckpt::LocalShard> sharded_state_dict() const;
  // The addresses of these owners, each at its first shard, in the order of the shards. Nothing
  // else in a sharded_state_dict() changes when parameters move.
  std::vector<std::byte*> owner_addresses() const;

 private:
  std::size_t find(const std::string& key) const;
  void add_leaf(at::Tensor value, std::vector<std::size_t> parameters, GradientOverTp gradient);
  at::Tensor part_of(const Leaf& leaf, std::size_t index) const;
  void mark_unloaded(const Leaf& leaf) const;

  at::Device device_;
  std::vector<Parameter> parameters_;
  std::vector<Leaf> leaves_;
  std::vector<std::pair<std::size_t, std::int64_t>>
      leaf_of_;  // of each parameter: leaf, index in it
  std::unordered_map<std::string, std::size_t> index_;
  std::vector<std::pair<c10::Storage, std::size_t>> released_;  // and its bytes
};

at::ScalarType scalar_type(distckpt::DType dtype);

}  // namespace ferry::models
