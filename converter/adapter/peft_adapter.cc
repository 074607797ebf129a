#include "converter/adapter/peft_adapter.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <utility>

#include "converter/adapter/lora_settings.h"
#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::SafetensorsEntry;

void require_matrix(const SafetensorsEntry& entry, const std::string& source) {
  require(entry.shape.rank() == 2 && distckpt::is_floating_point(entry.dtype), ErrorKind::kLayout,
          "{}: {}: is {} {}, expected a matrix of floating-point numbers", source, entry.name,
          short_name(entry.dtype), to_string(entry.shape));
}

std::vector<float> transposed(const std::vector<float>& matrix, std::int64_t rows) {
  const auto columns = static_cast<std::int64_t>(matrix.size()) / rows;
  std::vector<float> result(matrix.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c)
      result[static_cast<std::size_t>(c * rows + r)] =
          matrix[static_cast<std::size_t>(r * columns + c)];
  }
  return result;
}

using AdapterParts = std::map<std::string, SafetensorsEntry>;

AdaptedTensor adapted_tensor(const std::string& module,
                             const AdapterParts& parts,
                             const LoraSettings& settings,
                             const std::string& source) {
  AdaptedTensor tensor{.tensor = module + ".weight"};
  if (const auto base = parts.find("base_layer"); base != parts.end()) {
    require_matrix(base->second, source);
    tensor.base = base->second;
    tensor.rows = tensor.base->shape[0];
    tensor.columns = tensor.base->shape[1];
    if (parts.size() == 1) return tensor;
  }
  tensor.embedding = parts.contains("lora_embedding_A");
  const std::string prefix = tensor.embedding ? "lora_embedding_" : "lora_";
  require(parts.contains(prefix + "A") && parts.contains(prefix + "B"), ErrorKind::kCorrupt,
          "{}: {}: one of two factors is missing", source, module);
  tensor.a = parts.at(prefix + "A");
  tensor.b = parts.at(prefix + "B");
  require_matrix(tensor.a, source);
  require_matrix(tensor.b, source);
  tensor.rank = tensor.a.shape[0];
  require(tensor.rank > 0 && tensor.b.shape[1] == tensor.rank, ErrorKind::kCorrupt,
          "{}: {}: the factors {} and {} have no common rank", source, module,
          to_string(tensor.a.shape), to_string(tensor.b.shape));
  const distckpt::Shape shape{tensor.embedding ? tensor.a.shape[1] : tensor.b.shape[0],
                              tensor.embedding ? tensor.b.shape[0] : tensor.a.shape[1]};
  require(!tensor.base || tensor.base->shape == shape, ErrorKind::kCorrupt,
          "{}: {}: the factors change {}, the base's weight is {}", source, module,
          to_string(shape), tensor.base ? to_string(tensor.base->shape) : "");
  tensor.rows = shape[0];
  tensor.columns = shape[1];
  tensor.scaling = settings.scaling(module, tensor.rank);
  const auto magnitude = parts.find("lora_magnitude_vector");
  require((magnitude != parts.end()) == settings.uses_dora(), ErrorKind::kLayout,
          "{}: {}: use_dora and the presence of its magnitudes contradict each other", source,
          module);
  if (magnitude == parts.end()) return tensor;
  require(!tensor.embedding && magnitude->second.shape.product() == tensor.rows, ErrorKind::kLayout,
          "{}: {}: {} magnitudes, expected one for each of {} rows", source, module,
          magnitude->second.shape.product(), tensor.rows);
  tensor.magnitude = magnitude->second;
  return tensor;
}

}  // namespace

PeftAdapter::PeftAdapter(const fs::path& folder)
    : folder_(folder), weights_(folder / kAdapterWeights) {
  const LoraSettings settings(folder / kAdapterConfig);
  settings.refuse("target_parameters");
  settings.refuse("modules_to_save");
  const auto source = weights_.path().string();
  const auto header = distckpt::read_safetensors_header(weights_.path());
  std::map<std::string, std::map<std::string, SafetensorsEntry>> modules;
  for (const auto& entry : header.entries) {
    const auto key = settings.parse_key(entry.name, source);
    modules[key.module].emplace(key.part, entry);
  }
  require(!modules.empty(), ErrorKind::kCorrupt, "{}: changes nothing", source);
  for (auto& [module, parts] : modules)
    tensors_.push_back(adapted_tensor(module, parts, settings, source));
  distckpt::RunningDigest identity;
  identity.add(distckpt::as_bytes(settings.text()));
  identity.add(distckpt::as_bytes(header.prefix));
  identity.add(distckpt::as_bytes(
      fmt::format("{} {}", weights_.identity().inode, weights_.identity().modified_ns)));
  identity_ = identity.digest();
}

std::vector<float> PeftAdapter::read(const SafetensorsEntry& entry,
                                     std::int64_t first,
                                     std::int64_t count) const {
  const auto size = size_of(entry.dtype);
  std::vector<std::byte> raw(static_cast<std::size_t>(count * size));
  weights_.read_at(entry.begin + first * size, raw);
  std::vector<float> values(static_cast<std::size_t>(count));
  const auto into = std::as_writable_bytes(std::span(values));
  if (entry.dtype == distckpt::DType::kF32) {
    std::ranges::copy(raw, into.begin());
  } else {
    distckpt::cast(entry.dtype, raw, distckpt::DType::kF32, into, distckpt::CastRule::kRound);
  }
  return values;
}

std::vector<float> PeftAdapter::read(const SafetensorsEntry& entry) const {
  return read(entry, 0, entry.shape.product());
}

std::vector<float> PeftAdapter::base_elements(const AdaptedTensor& tensor,
                                              std::int64_t first,
                                              std::int64_t count) const {
  return read(tensor.base.value(), first, count);
}

LowRankChange PeftAdapter::load(const AdaptedTensor& tensor) const {
  auto a = read(tensor.a);
  auto b = read(tensor.b);
  LowRankChange change;
  if (tensor.embedding) {
    change.left = transposed(a, tensor.rank);
    change.right = transposed(b, tensor.columns);
  } else {
    change.left = std::move(b);
    change.right = std::move(a);
  }
  if (tensor.magnitude) change.magnitude = read(*tensor.magnitude);
  return change;
}

}  // namespace ferry::converter
