#include "converter/adapter/adapter_changes.h"

#include <algorithm>
#include <string_view>

#include "converter/adapter/factors/lora_settings.h"
#include "converter/adapter/open_adapter.h"
#include "converter/adapter/peft_changes.h"
#include "converter/bridge/tensor_stream.h"
#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/elements/cast.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::Box;
using distckpt::DType;
using distckpt::Shape;

// An adapter of Megatron-Bridge or of FSDP by rank, whose factors have PEFT's names here
// (open_adapter.h).
std::vector<AdaptedTensor> changes_of(const Adapter& adapter, const ModelMap& base) {
  const auto& map = adapter.checkpoint.map;
  std::vector<AdaptedTensor> tensors;
  for (std::size_t i = 0; i < adapter.adapted.size(); ++i) {
    const auto& one = adapter.adapted[i];
    const auto& of = base.megatron[one.megatron];
    const auto name_of = [&](std::size_t factor) {
      return map.tensors[map.megatron[factor].parts.front().model].name;
    };
    const auto a = name_of(2 * i);
    if (of.expert) {
      add_expert_changes(
          base, of,
          {.a = a, .b = name_of(2 * i + 1), .rank = one.rank, .scaling = adapter.scaling[i]},
          tensors);
      continue;
    }
    const auto merged = merged_tensors(of);
    for (std::size_t part = 0; part < merged.size(); ++part) {
      if (one.part != AdaptedParameter::kFused && one.part != static_cast<int>(part)) continue;
      const auto& tensor = base.tensors[merged[part]];
      tensors.push_back({.tensor = tensor.name,
                         .rows = tensor.shape[0],
                         .columns = tensor.shape[1],
                         .rank = one.rank,
                         .scaling = adapter.scaling[i],
                         .a = a,
                         .b = factor_prefix(base, tensor.name) + ".lora_B.weight"});
    }
  }
  for (const auto& one : adapter.tower) {
    tensors.push_back({.tensor = one.tensor.name,
                       .rows = one.tensor.shape[0],
                       .columns = one.tensor.shape[1],
                       .rank = one.rank,
                       .scaling = one.scaling,
                       .a = one.prefix + ".lora_A.weight",
                       .b = one.prefix + ".lora_B.weight"});
  }
  return tensors;
}

// Element (i, j) of a matrix [rows, columns] becomes (j, i).
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

std::optional<fs::path> find_peft(const fs::path& path) {
  for (const auto& folder : {path, path / kVerlAdapter})
    if (distckpt::source_exists(folder / kAdapterConfig)) return folder;
  return std::nullopt;
}

distckpt::Digest digest_of(const distckpt::SourceFiles& files, const std::optional<double>& alpha) {
  distckpt::RunningDigest digest;
  for (const auto& [path, file] : files.files()) {
    digest.add(distckpt::as_bytes(fmt::format("{} {} {} {} {}\n", path.string(), file.device,
                                              file.inode, file.size, file.modified_ns)));
  }
  if (alpha) digest.add(distckpt::as_bytes(fmt::format("{}", *alpha)));
  return digest.digest();
}

}  // namespace

AdapterChanges::AdapterChanges(const fs::path& path,
                               const Checkpoint& base,
                               const std::optional<double>& alpha) {
  require_adaptable(base);
  auto checkpoint = std::make_shared<Checkpoint>();
  std::vector<TiedTensors> tied;
  if (const auto folder = find_peft(path)) {
    require(!alpha, ErrorKind::kUsage, "{}: says its alpha itself; --lora-alpha is of others",
            (*folder / kAdapterConfig).string());
    const auto files = std::make_shared<distckpt::SourceFiles>();
    const distckpt::NotedFiles noted(*files);
    auto changes = read_peft_changes(*folder, base);
    *checkpoint = std::move(changes.checkpoint);
    checkpoint->files = files;
    tensors_ = std::move(changes.tensors);
    tied = std::move(changes.tied);
  } else {
    auto adapter = open_adapter(path, base, {.alpha = alpha});
    tensors_ = changes_of(adapter, base.map);
    *checkpoint = std::move(adapter.checkpoint);
  }
  checkpoint->files->settle();
  identity_ = digest_of(*checkpoint->files, alpha);
  parts_ = std::make_unique<const CheckpointParts>(std::move(checkpoint));
  for (const auto& one : tied) {
    require(are_tied(one), ErrorKind::kLayout,
            "{}: {}: the base has one tensor for both ends, but it is not {}{}", path.string(),
            one.tensor, one.transposed ? "the transpose of " : "", one.other);
  }
}

const Shape& AdapterChanges::shape_of(const std::string& name) const {
  const auto& layout = parts_->whole()->layout;
  return layout.tensor(*layout.find(name)).shape;
}

bool AdapterChanges::are_tied(const TiedTensors& tied) const {
  const auto& shape = shape_of(tied.tensor);
  if (tied.transposed)
    return read(tied.tensor, std::nullopt) == transposed(read(tied.other, std::nullopt), shape[1]);
  constexpr std::int64_t kElements = 1 << 20;  // at a time
  const auto rows = std::max<std::int64_t>(1, kElements * shape[0] / shape.product());
  for (std::int64_t row = 0; row < shape[0]; row += rows) {
    const auto box = rows_of(shape, row, std::min(rows, shape[0] - row));
    if (read(tied.tensor, box) != read(tied.other, box)) return false;
  }
  return true;
}

std::vector<float> AdapterChanges::read(const std::string& name,
                                        const std::optional<Box>& box) const {
  const auto part = parts_->part_with(name);
  TensorStream stream(part, box_of_tensor(*part, name, box), {.threads = 1});
  const auto& wanted = stream.tensors().front();
  std::vector<std::byte> raw(static_cast<std::size_t>(wanted.num_bytes()));
  stream.start({raw.data()});
  while (stream.wait({})) {
  }
  std::vector<float> values(static_cast<std::size_t>(wanted.shape.product()));
  const auto into = std::as_writable_bytes(std::span(values));
  if (wanted.dtype == DType::kF32) {
    std::ranges::copy(raw, into.begin());
  } else {
    distckpt::cast(wanted.dtype, raw, DType::kF32, into, distckpt::CastRule::kRound);
  }
  return values;
}

AdapterChanges::Values AdapterChanges::whole(const std::string& name) const {
  constexpr std::size_t kKept = 8;  // two of gate and up, two of down, of a layer and the next
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(recent_, name, &std::pair<std::string, Values>::first);
  if (found != recent_.end()) return found->second;
  auto values = std::make_shared<const std::vector<float>>(read(name, std::nullopt));
  if (recent_.size() == kKept) recent_.pop_front();
  recent_.emplace_back(name, values);
  return values;
}

std::vector<float> AdapterChanges::saved_elements(const AdaptedTensor& tensor,
                                                  std::int64_t first,
                                                  std::int64_t count) const {
  const auto& name = tensor.whole ? *tensor.whole : tensor.base.value();
  const auto begin = first / tensor.columns;
  const auto end = distckpt::ceil_div(first + count, tensor.columns);
  auto rows = read(name, rows_of(shape_of(name), tensor.first_out + begin, end - begin));
  const auto skipped = first - begin * tensor.columns;
  rows.erase(rows.begin(), rows.begin() + skipped);
  rows.resize(static_cast<std::size_t>(count));
  return rows;
}

LowRankChange AdapterChanges::load(const AdaptedTensor& tensor) const {
  const auto rank = tensor.rank;
  const auto in = tensor.transposed ? tensor.rows : tensor.columns;
  const auto out = tensor.transposed ? tensor.columns : tensor.rows;
  const auto all_a = whole(tensor.a);
  const auto all_b = whole(tensor.b);
  const auto first = all_a->begin() + tensor.expert * rank * in;
  std::vector<float> a(first, first + rank * in);
  std::vector<float> b(static_cast<std::size_t>(out * rank));
  for (std::int64_t o = 0; o < out; ++o) {
    const auto row = (tensor.first_out + o) * rank * tensor.num_experts;
    for (std::int64_t k = 0; k < rank; ++k)
      b[static_cast<std::size_t>(o * rank + k)] =
          (*all_b)[static_cast<std::size_t>(row + k * tensor.num_experts + tensor.expert)];
  }
  LowRankChange change;
  if (tensor.transposed) {
    change.left = transposed(a, rank);
    change.right = transposed(b, out);
  } else {
    change.left = std::move(b);
    change.right = std::move(a);
  }
  if (tensor.magnitude) change.magnitude = read(*tensor.magnitude, std::nullopt);
  return change;
}

}  // namespace ferry::converter
