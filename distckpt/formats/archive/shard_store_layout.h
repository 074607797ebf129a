// The archive's layout of tensors: large ones in datasets of their own, cut into chunks of which a
// tensor-parallel slice of rows or columns needs few; small ones side by side in slabs, one per
// dtype.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/formats/archive/shard_store.h"
#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

inline constexpr std::string_view kShardStoreFormat = "ferry-archive-1";
inline constexpr std::string_view kTensorGroup = "tensors";
inline constexpr std::string_view kSlabGroup = "slabs";
inline constexpr std::string_view kFileGroup = "files";
inline constexpr std::string_view kIndexDataset = "index";

// A dataset of a file. Its chunks are consecutive storages of the layout, in row-major order of the
// grid that they form.
struct StoredDataset {
  std::string path{};  // "tensors/lm_head.weight", "slabs/BF16"
  DType dtype = DType::kBF16;
  Shape shape{};
  Shape chunk{};  // of the rank of shape; none is 0
  std::uint32_t file = 0;
  StorageId first_chunk = 0;

  bool is_slab() const { return path.starts_with(kSlabGroup); }
  Shape grid() const;  // chunks per dimension
  std::int64_t num_chunks() const { return grid().product(); }
  std::int64_t chunk_bytes() const { return chunk.product() * size_of(dtype); }
  Dims chunk_offset(std::int64_t index) const;       // of its first element, in the dataset
  Box chunk_box(std::int64_t index) const;           // the part of it that lies in the dataset
  std::string chunk_name(std::int64_t index) const;  // "tensors/lm_head.weight[0:512, 0:1024]"
};

struct StoredTensor {
  std::string name{};
  Shape shape{};
  std::uint32_t dataset = 0;
  std::int64_t begin = 0;  // its first element, in a slab
};

std::string tensor_path(std::string_view name);  // "tensors/lm_head.weight"

struct ShardStoreLayout {
  std::vector<std::filesystem::path> files{};
  std::vector<StoredDataset> datasets{};
  std::vector<StoredTensor> tensors{};
};

ShardStoreLayout plan_shard_store(const std::filesystem::path& folder,
                                  const std::vector<ShardStoreTensor>& tensors,
                                  const ShardStoreOptions& options);

// The tensors as boxes of chunks. Adds a storage for every chunk and sets the datasets'
// first_chunk.
Layout make_layout(ShardStoreLayout& store);

Shape chunk_shape(const Shape& shape, DType dtype, std::int64_t chunk_bytes);

}  // namespace ferry::distckpt
