#include "tests/bench/reshard/mesh_weights.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cctype>
#include <functional>
#include <map>
#include <string_view>

#include "distckpt/base/error.h"

namespace ferry {
namespace {

using distckpt::Box;
using models::Parameter;

constexpr std::int64_t kElementsAtATime = std::int64_t{1} << 24;
constexpr std::string_view kExperts = "mlp.experts.experts.";  // their number follows

// Calls `body` with parts of a parameter of so many elements at most, [rows] or [rows, columns],
// and the box of the whole tensor that each is.
void for_each_part(const Parameter& parameter,
                   const std::function<void(const at::Tensor&, const Box&)>& body) {
  std::int64_t row = 0;
  for (const auto& box : parameter.spec.boxes) {
    const auto rows_at_a_time =
        std::max<std::int64_t>(1, kElementsAtATime * box.size[0] / box.volume());
    for (std::int64_t first = 0; first < box.size[0]; first += rows_at_a_time) {
      auto part = box;
      part.offset[0] += first;
      part.size[0] = std::min(rows_at_a_time, box.size[0] - first);
      body(parameter.value.narrow(0, row + first, part.size[0]).view(at::kShort), part);
    }
    row += box.size[0];
  }
}

// The upper half of a multiplicative hash of key and row-major index, which wraps around.
at::Tensor expected_bits(const Parameter& parameter, const Box& box) {
  const auto options = at::TensorOptions().dtype(at::kInt).device(parameter.value.device());
  auto index = at::arange(box.offset[0], box.end(0), options);
  if (box.rank() == 2)
    index = (index * parameter.spec.global_shape[1]).unsqueeze(1) +
            at::arange(box.offset[1], box.end(1), options);
  const auto seed = static_cast<std::int32_t>(std::hash<std::string>()(parameter.spec.key));
  return index.add_(seed)
      .mul_(static_cast<std::int32_t>(0x9E3779B1U))
      .bitwise_right_shift_(16)
      .to(at::kShort);
}

}  // namespace

models::ParallelConfig BenchMesh::parse(const std::string& text) {
  models::ParallelConfig parallel;
  std::map<std::string, int> sizes;
  for (std::size_t at = 0; at < text.size();) {
    const auto digits = text.find_first_of("0123456789", at);
    require(digits != std::string::npos && digits > at, ErrorKind::kUsage,
            "mesh {}: expected an axis and its size", text);
    auto end = digits;
    int size = 0;
    for (; end < text.size() && std::isdigit(static_cast<unsigned char>(text[end])) != 0; ++end)
      size = 10 * size + (text[end] - '0');
    sizes[text.substr(at, digits - at)] = size;
    at = end;
  }
  for (const auto& [axis, size] : sizes) {
    if (axis == "tp")
      parallel.tensor_model_parallel_size = size;
    else if (axis == "pp")
      parallel.pipeline_model_parallel_size = size;
    else if (axis == "cp")
      parallel.context_parallel_size = size;
    else if (axis == "ep")
      parallel.expert_model_parallel_size = size;
    else if (axis == "etp")
      parallel.expert_tensor_parallel_size = size;
    else if (axis == "vpp")
      parallel.virtual_pipeline_model_parallel_size = size;
    else
      fail(ErrorKind::kUsage, "mesh {}: there is no axis {}", text, axis);
  }
  return parallel;
}

int BenchMesh::index_of(int rank) const {
  const auto found = std::ranges::find(ranks, rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

std::vector<models::ParameterSpec> BenchMesh::specs(const models::TransformerConfig& config,
                                                    int index) const {
  const auto at = shape.coordinates(index);
  std::vector<models::ParameterSpec> all;
  for (const auto& chunk : models::stage_chunks(config, shape.parallel(), at.pp)) {
    auto specs = models::parameter_layout(config, shape, at, chunk, {});
    std::ranges::move(specs, std::back_inserter(all));
  }
  return all;
}

MeshWeights::MeshWeights(const models::TransformerConfig& config,
                         const BenchMesh& mesh,
                         int rank,
                         at::Device device) {
  const int index = mesh.index_of(rank);
  if (index < 0) return;
  parameters_.emplace(mesh.specs(config, index), device);
  std::map<std::string, std::vector<std::string>> stacks;  // of experts, as models take them
  for (const auto& parameter : parameters_->all()) {
    require(size_of(parameter.spec.dtype) == 2, ErrorKind::kUsage,
            "{}: parameters of two bytes are measured", parameter.spec.key);
    const auto& key = parameter.spec.key;
    const auto expert = key.find(kExperts);
    if (expert == std::string::npos) {
      parameters_->take(key);
      continue;
    }
    const auto number = expert + kExperts.size();
    stacks[key.substr(0, number) + key.substr(key.find('.', number))].push_back(key);
  }
  for (const auto& [stack, keys] : stacks) parameters_->take_stacked(keys);
}

const std::vector<Parameter>& MeshWeights::all() const {
  static const std::vector<Parameter> none;
  return parameters_ ? parameters_->all() : none;
}

std::vector<distckpt::LocalShard> MeshWeights::sharded_state_dict() const {
  return parameters_ ? parameters_->sharded_state_dict() : std::vector<distckpt::LocalShard>();
}

std::vector<std::byte*> MeshWeights::addresses() const {
  return parameters_ ? parameters_->owner_addresses() : std::vector<std::byte*>();
}

void MeshWeights::fill() const {
  for (const auto& parameter : all()) {
    for_each_part(parameter, [&](const at::Tensor& bits, const Box& box) {
      bits.copy_(expected_bits(parameter, box));
    });
  }
}

void MeshWeights::clear() const {
  for (const auto& parameter : all()) parameter.value.view(at::kShort).fill_(-1);
}

std::int64_t MeshWeights::count_unequal(std::int64_t padded_vocab) const {
  if (all().empty()) return 0;
  auto count =
      at::zeros({}, at::TensorOptions().dtype(at::kLong).device(all().front().value.device()));
  for (const auto& parameter : all()) {
    for_each_part(parameter, [&](const at::Tensor& bits, const Box& box) {
      auto expected = expected_bits(parameter, box);
      if (parameter.spec.vocab >= 0 && box.end(0) > padded_vocab) {
        const auto first = std::max<std::int64_t>(0, padded_vocab - box.offset[0]);
        expected.narrow(0, first, box.size[0] - first).zero_();
      }
      count += bits.ne(expected).sum();
    });
  }
  return count.item<std::int64_t>();
}

}  // namespace ferry
