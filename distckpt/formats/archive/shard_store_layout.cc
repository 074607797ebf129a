#include "distckpt/formats/archive/shard_store_layout.h"

#include <algorithm>
#include <map>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/storage/filenames.h"

namespace ferry::distckpt {
namespace {

// Columns are cut into as many parts as tensor parallel sizes divide, if that leaves each run of a
// row long enough to be worth reading.
constexpr std::int64_t kMaxColumnParts = 8;
constexpr std::int64_t kMinRunBytes = 512;

// Deals tensors out to files and, small ones, to slabs.
class Planner {
 public:
  Planner(const std::vector<ShardStoreTensor>& tensors, const ShardStoreOptions& options)
      : options_(options) {
    for (const auto& tensor : tensors) add(tensor);
    end_file();
  }

  ShardStoreLayout finish(const std::filesystem::path& folder) {
    const auto count = std::max<std::size_t>(1, file_);
    for (std::size_t i = 0; i < count; ++i) {
      store_.files.push_back(folder / shard_store_filename(i, count));
    }
    return std::move(store_);
  }

 private:
  void add(const ShardStoreTensor& tensor) {
    require(
        tensor.name.find('/') == std::string::npos && tensor.name != "." && !tensor.name.empty(),
        ErrorKind::kLayout, "{}: cannot be the name of a dataset", tensor.name);
    const auto bytes = tensor.shape.product() * size_of(tensor.dtype);
    if (options_.max_file_bytes && file_bytes_ > 0 &&
        file_bytes_ + bytes > *options_.max_file_bytes)
      end_file();
    file_bytes_ += std::max<std::int64_t>(bytes, 1);
    StoredTensor stored{.name = tensor.name, .shape = tensor.shape};
    if (tensor.shape.empty() ||
        bytes <= std::min(options_.small_tensor_bytes, options_.chunk_bytes)) {
      stored.dataset = slab(tensor.dtype);
      auto& length = store_.datasets[stored.dataset].shape[0];
      const auto chunk = options_.chunk_bytes / size_of(tensor.dtype);
      const auto elements = tensor.shape.product();
      // A small tensor lies in one chunk.
      if (length % chunk + elements > chunk) length = round_up(length, chunk);
      stored.begin = length;
      length += elements;
    } else {
      stored.dataset = static_cast<std::uint32_t>(store_.datasets.size());
      store_.datasets.push_back(
          {.path = tensor_path(tensor.name),
           .dtype = tensor.dtype,
           .shape = tensor.shape,
           .chunk = chunk_shape(tensor.shape, tensor.dtype, options_.chunk_bytes),
           .file = file_});
    }
    store_.tensors.push_back(std::move(stored));
  }

  std::uint32_t slab(DType dtype) {
    const auto next = static_cast<std::uint32_t>(store_.datasets.size());
    const auto [at, added] = slabs_.emplace(dtype, next);
    if (added) {
      store_.datasets.push_back({.path = fmt::format("{}/{}", kSlabGroup, safetensors_name(dtype)),
                                 .dtype = dtype,
                                 .shape = {0},
                                 .chunk = {1},
                                 .file = file_});
    }
    return at->second;
  }

  void end_file() {
    if (file_bytes_ == 0) return;
    for (const auto& [dtype, index] : slabs_) {
      auto& dataset = store_.datasets[index];
      dataset.chunk[0] =
          std::clamp<std::int64_t>(dataset.shape[0], 1, options_.chunk_bytes / size_of(dtype));
    }
    slabs_.clear();
    file_bytes_ = 0;
    ++file_;
  }

  const ShardStoreOptions& options_;
  ShardStoreLayout store_;
  std::map<DType, std::uint32_t> slabs_;  // of the current file
  std::uint32_t file_ = 0;
  std::int64_t file_bytes_ = 0;
};

}  // namespace

Shape StoredDataset::grid() const {
  Shape grid;
  for (int d = 0; d < shape.rank(); ++d) grid.push_back(ceil_div(shape[d], chunk[d]));
  return grid;
}

Dims StoredDataset::chunk_offset(std::int64_t index) const {
  auto offset = coordinates_of(grid(), index);
  for (int d = 0; d < shape.rank(); ++d) offset[d] *= chunk[d];
  return offset;
}

Box StoredDataset::chunk_box(std::int64_t index) const {
  Box box{.offset = chunk_offset(index), .size = chunk};
  for (int d = 0; d < box.rank(); ++d) box.size[d] = std::min(chunk[d], shape[d] - box.offset[d]);
  return box;
}

std::string StoredDataset::chunk_name(std::int64_t index) const {
  return path + to_string(chunk_box(index));
}

std::string tensor_path(std::string_view name) {
  return fmt::format("{}/{}", kTensorGroup, name);
}

// Full in the dimensions but the last two, of which columns are cut first: a chunk is a tile of a
// matrix.
Shape chunk_shape(const Shape& shape, DType dtype, std::int64_t chunk_bytes) {
  auto chunk = Dims::filled(shape.rank(), 1);
  auto room = std::max<std::int64_t>(1, chunk_bytes / size_of(dtype));
  const int last = shape.rank() - 1;
  if (last < 0) return chunk;
  auto columns = shape[last];
  if (shape.rank() >= 2 && shape.product() > room) {
    // There are as many bands as columns, if there are too few chunks for both.
    const auto chunks = ceil_div(shape.product(), room);
    for (std::int64_t parts = 2;
         parts <= kMaxColumnParts && parts * parts <= chunks && shape[last] % parts == 0;
         parts *= 2) {
      if (shape[last] / parts * size_of(dtype) >= kMinRunBytes) columns = shape[last] / parts;
    }
  }
  chunk[last] = std::clamp<std::int64_t>(columns, 1, room);
  room /= chunk[last];
  for (int d = last - 1; d >= 0 && room > 1; --d) {
    // Bands of one height: the last one is hardly shorter than the others.
    const auto bands = ceil_div(shape[d], room);
    chunk[d] = std::max<std::int64_t>(1, ceil_div(shape[d], std::max<std::int64_t>(1, bands)));
    if (chunk[d] < shape[d]) break;
    room /= chunk[d];
  }
  return chunk;
}

ShardStoreLayout plan_shard_store(const std::filesystem::path& folder,
                                  const std::vector<ShardStoreTensor>& tensors,
                                  const ShardStoreOptions& options) {
  return Planner(tensors, options).finish(folder);
}

Layout make_layout(ShardStoreLayout& store) {
  Layout layout;
  for (auto& dataset : store.datasets) {
    dataset.first_chunk = static_cast<StorageId>(layout.storages().size());
    const auto count = dataset.num_chunks();
    for (std::int64_t i = 0; i < count; ++i) {
      layout.add_storage(ChunkStorage{.path = store.files[dataset.file],
                                      .decoded_size = dataset.chunk_bytes(),
                                      .element_size = size_of(dataset.dtype),
                                      .name = dataset.chunk_name(i)});
    }
  }
  for (const auto& stored : store.tensors) {
    const auto& dataset = store.datasets[stored.dataset];
    const auto storage = [&](std::int64_t chunk) {
      return dataset.first_chunk + static_cast<StorageId>(chunk);
    };
    TensorLayout tensor{.name = stored.name, .dtype = dataset.dtype, .shape = stored.shape};
    const auto size = size_of(dataset.dtype);
    if (!dataset.is_slab()) {
      const auto strides = byte_strides(dataset.chunk, size);
      const auto count = dataset.num_chunks();
      for (std::int64_t i = 0; i < count; ++i) {
        tensor.shards.push_back({.box = dataset.chunk_box(i),
                                 .at = {.storage = storage(i), .offset = 0, .strides = strides}});
      }
    } else if (stored.shape.product() > 0) {
      tensor.shards.push_back(packed_shard(Box::whole(stored.shape), dataset.dtype,
                                           storage(stored.begin / dataset.chunk[0]),
                                           stored.begin % dataset.chunk[0] * size));
      // A damaged slab names a tensor in it, though its own name does not.
      auto& chunk = std::get<ChunkStorage>(layout.storage(tensor.shards.front().at.storage));
      (chunk.first_tensor.empty() ? chunk.first_tensor : chunk.last_tensor) = stored.name;
    }
    layout.add_tensor(std::move(tensor));
  }
  return layout;
}

}  // namespace ferry::distckpt
