#include "distckpt/plan/layout.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/plan/coverage.h"

namespace ferry::distckpt {

std::string describe(const Storage& storage) {
  if (const auto* file = std::get_if<FileStorage>(&storage)) return file->path.string();
  if (const auto* chunk = std::get_if<ChunkStorage>(&storage)) {
    auto text = fmt::format("{}: bytes {} to {}, the chunk {}", chunk->path.string(), chunk->offset,
                            chunk->offset + chunk->encoded_size, chunk->name);
    if (!chunk->first_tensor.empty()) text += fmt::format(" of {}", chunk->first_tensor);
    if (!chunk->last_tensor.empty()) text += fmt::format(" to {}", chunk->last_tensor);
    return text;
  }
  if (std::holds_alternative<ComputedStorage>(storage)) return "what is computed";
  const auto* remote = std::get_if<RankStorage>(&storage);
  return remote == nullptr ? "memory" : fmt::format("memory of rank {}", remote->rank);
}

const std::filesystem::path* file_of(const Storage& storage) {
  if (const auto* file = std::get_if<FileStorage>(&storage)) return &file->path;
  if (const auto* chunk = std::get_if<ChunkStorage>(&storage)) return &chunk->path;
  return nullptr;
}

StorageId Layout::add_storage(Storage storage) {
  storages_.push_back(std::move(storage));
  return static_cast<StorageId>(storages_.size() - 1);
}

std::uint32_t Layout::add_tensor(TensorLayout tensor) {
  const auto volume = checked_volume(tensor.shape);
  std::int64_t bytes = 0;
  require(volume && !__builtin_mul_overflow(*volume, size_of(tensor.dtype), &bytes),
          ErrorKind::kLayout, "{}: the shape {} has a negative dimension or overflows", tensor.name,
          to_string(tensor.shape));
  const auto index = static_cast<std::uint32_t>(tensors_.size());
  const auto [_, added] = index_.emplace(tensor.name, index);
  require(added, ErrorKind::kLayout, "{}: the tensor is there twice", tensor.name);
  tensors_.push_back(std::move(tensor));
  return index;
}

std::optional<std::uint32_t> Layout::find(std::string_view name) const {
  const auto found = index_.find(std::string(name));
  if (found == index_.end()) return std::nullopt;
  return found->second;
}

std::int64_t Layout::num_bytes() const {
  std::int64_t total = 0;
  for (const auto& tensor : tensors_) total += tensor.num_bytes();
  return total;
}

void fold_last_dimensions(TensorLayout& tensor) {
  const int last = tensor.shape.rank() - 1;
  require(last >= 1, ErrorKind::kBug, "{}: has no two dimensions", tensor.name);
  const auto size = tensor.shape[last];
  const auto fold = [&](const Dims& dims, std::int64_t count) {
    auto folded = Dims(std::span(dims.begin(), static_cast<std::size_t>(last)));
    folded[last - 1] *= count;
    return folded;
  };
  for (auto& shard : tensor.shards) {
    auto& strides = shard.at.strides;
    require(shard.box.size[last] == size && strides[last - 1] == strides[last] * size,
            ErrorKind::kLayout, "{}: {} of it lies apart, which is not handled", tensor.name,
            to_string(shard.box));
    const auto stride = strides[last];
    strides = fold(strides, 1);
    strides[last - 1] = stride;
    shard.box = {fold(shard.box.offset, size), fold(shard.box.size, size)};
  }
  tensor.shape = fold(tensor.shape, size);
}

Shard packed_shard(const Box& box, DType dtype, StorageId storage, std::int64_t offset) {
  const auto strides = byte_strides(box.size, size_of(dtype));
  return {.box = box, .at = {.storage = storage, .offset = offset, .strides = strides}};
}

namespace {

// The files that hold a tensor, for messages: the first ones.
std::string describe_files(const Layout& layout, const TensorLayout& tensor) {
  constexpr std::size_t kMaxFiles = 4;
  std::vector<std::string> files;
  for (const auto& shard : tensor.shards) {
    const auto& storage = layout.storages()[shard.at.storage];
    const auto* path = file_of(storage);
    auto name = path != nullptr ? path->string() : describe(storage);
    if (std::ranges::find(files, name) == files.end()) files.push_back(std::move(name));
  }
  const auto others = files.size() - std::min(files.size(), kMaxFiles);
  files.resize(files.size() - others);
  return fmt::format("{}{}", fmt::join(files, ", "),
                     others > 0 ? fmt::format(" and {} others", others) : "");
}

}  // namespace

void check_layout(const Layout& layout) {
  std::vector<Box> boxes;
  for (const auto& tensor : layout.tensors()) {
    boxes.clear();
    for (const auto& shard : tensor.shards) {
      if (!shard.box.inside(tensor.shape)) {
        fail(ErrorKind::kLayout, "{}: {}: the box {} leaves the shape {}",
             describe(layout.storages()[shard.at.storage]), tensor.name, to_string(shard.box),
             to_string(tensor.shape));
      }
      boxes.push_back(shard.box);
    }
    with_context(
        [&] {
          return fmt::format("adding up what {} holds of it", describe_files(layout, tensor));
        },
        [&] { require_exactly_once(tensor.name, tensor.shape, boxes, "stored"); });
  }
}

}  // namespace ferry::distckpt
