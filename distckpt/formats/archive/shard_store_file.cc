#include "distckpt/formats/archive/shard_store_file.h"

#include <algorithm>
#include <array>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/execute/plane_codec.h"
#include "distckpt/formats/archive/shard_store_index.h"
#include "distckpt/formats/archive/shard_store_trailer.h"

namespace ferry::distckpt {
namespace {

constexpr std::size_t kMaxOpenDatasets = 16;

// Out of the range that HDF5 leaves to private use. It tells other readers that chunks are encoded;
// libhdf5 never runs it, and without plugins looks for no other.
constexpr H5Z_filter_t kPlaneFilter = 311;

void register_plane_filter() {
  const H5Z_class2_t filter{H5Z_CLASS_T_VERS,
                            kPlaneFilter,
                            1,
                            1,
                            "ferry byte planes",
                            nullptr,
                            nullptr,
                            [](unsigned, std::size_t, const unsigned*, std::size_t, std::size_t*,
                               void**) -> std::size_t { return 0; }};
  check_hdf5(H5PLset_loading_state(0), "HDF5");
  check_hdf5(H5Zregister(&filter), "HDF5");
}

hid_t hdf5_type(std::int64_t element_size) {
  switch (element_size) {
    case 1:
      return H5T_STD_U8LE;
    case 2:
      return H5T_STD_U16LE;
    case 4:
      return H5T_STD_U32LE;
    default:
      return H5T_STD_U64LE;
  }
}

// The place that HDF5 gave a chunk.
ChunkPlace find_chunk(const Hdf5Handle& handle, const StoredDataset& dataset, std::int64_t index) {
  const auto offset = hdf5_dims(dataset.chunk_offset(index));
  unsigned filter_mask = 0;
  haddr_t address = HADDR_UNDEF;
  hsize_t size = 0;
  check_hdf5(H5Dget_chunk_info_by_coord(handle.get(), offset.data(), &filter_mask, &address, &size),
             dataset.path);
  require(address != HADDR_UNDEF, ErrorKind::kBug, "the chunk {} is not there",
          dataset.chunk_name(index));
  return {.offset = static_cast<std::int64_t>(address), .size = static_cast<std::uint32_t>(size)};
}

}  // namespace

ShardStoreFile::ShardStoreFile(const ShardStoreLayout& store, std::uint32_t index)
    : store_(store), index_(index), path_(store.files[index].string()) {
  const Hdf5Lock lock;
  register_plane_filter();
  const auto count = std::ranges::count(store.datasets, index, &StoredDataset::file);
  // HDF5's structures side by side, so that there are few of them between the chunks.
  const auto block = std::clamp<std::int64_t>(count * 512, 4096, std::int64_t{1} << 20);
  file_ = create_hdf5(path_, block);
  for (const auto* group : {&kTensorGroup, &kSlabGroup}) create_group(file_, std::string(*group));
  for (const auto& dataset : store.datasets) {
    if (dataset.file == index && dataset.num_chunks() > 0) create_dataset(dataset);
  }
}

void ShardStoreFile::create_dataset(const StoredDataset& dataset) {
  const auto what = fmt::format("{}: {}", path_, dataset.path);
  const auto shape = hdf5_dims(dataset.shape);
  const auto chunk = hdf5_dims(dataset.chunk);
  const auto space = own_hdf5(H5Screate_simple(dataset.shape.rank(), shape.data(), nullptr), what);
  const auto create = own_hdf5(H5Pcreate(H5P_DATASET_CREATE), what);
  check_hdf5(H5Pset_obj_track_times(create.get(), false), what);
  check_hdf5(H5Pset_chunk(create.get(), dataset.chunk.rank(), chunk.data()), what);
  check_hdf5(H5Pset_fill_time(create.get(), H5D_FILL_TIME_NEVER), what);
  const std::array<unsigned, 2> values{1, static_cast<unsigned>(size_of(dataset.dtype))};
  check_hdf5(
      H5Pset_filter(create.get(), kPlaneFilter, H5Z_FLAG_MANDATORY, values.size(), values.data()),
      what);
  const auto made =
      own_hdf5(H5Dcreate2(file_.get(), dataset.path.c_str(), hdf5_type(size_of(dataset.dtype)),
                          space.get(), H5P_DEFAULT, create.get(), H5P_DEFAULT),
               what);
  write_attribute(made, "dtype", safetensors_name(dataset.dtype));
}

const Hdf5Handle& ShardStoreFile::open(std::uint32_t dataset) {
  const auto found = open_.find(dataset);
  if (found != open_.end()) return found->second;
  if (open_.size() >= kMaxOpenDatasets) open_.clear();
  const auto& path = store_.datasets[dataset].path;
  auto handle = own_hdf5(H5Dopen2(file_.get(), path.c_str(), H5P_DEFAULT), path_);
  return open_.emplace(dataset, std::move(handle)).first->second;
}

void ShardStoreFile::write(std::uint32_t dataset,
                           std::int64_t chunk,
                           std::span<const std::byte> encoded) {
  const Hdf5Lock lock;
  const auto offset = hdf5_dims(store_.datasets[dataset].chunk_offset(chunk));
  check_hdf5(H5Dwrite_chunk(open(dataset).get(), H5P_DEFAULT, 0, offset.data(), encoded.size(),
                            encoded.data()),
             path_);
  checksums_[{dataset, chunk}] = stated_checksum(encoded);
}

Digest ShardStoreFile::finish(const std::map<std::string, std::string>& small_files,
                              const std::vector<std::string>& trailers) {
  const Hdf5Lock lock;
  write_attribute(file_, "format", kShardStoreFormat);
  ShardStoreContents contents{.small_files = {}, .trailers = trailers};
  {
    std::map<std::string, Hdf5Handle> groups;
    for (const auto& [name, bytes] : small_files) {
      const auto slash = name.find('/');
      if (groups.empty()) groups[""] = create_group(file_, std::string(kFileGroup));
      auto& group = groups[name.substr(0, slash)];
      if (group.get() < 0) group = create_group(groups[""], name.substr(0, slash));
      const auto begin = write_bytes_dataset(group, name.substr(slash + 1), bytes);
      contents.small_files[name] = {.begin = begin,
                                    .end = begin + static_cast<std::int64_t>(bytes.size())};
    }
  }
  const auto text = make_index(store_, index_, contents);
  const auto begin = write_bytes_dataset(file_, std::string(kIndexDataset), text);
  std::vector<ChunkPlace> chunks;
  for (std::uint32_t d = 0; d < store_.datasets.size(); ++d) {
    const auto& dataset = store_.datasets[d];
    if (dataset.file != index_) continue;
    const auto count = dataset.num_chunks();
    for (std::int64_t i = 0; i < count; ++i) {
      chunks.push_back(find_chunk(open(d), dataset, i));
      chunks.back().crc = checksums_.at({d, i});
    }
  }
  open_.clear();
  close_hdf5(std::move(file_), path_);
  return append_trailer(path_, chunks,
                        {.begin = begin, .end = begin + static_cast<std::int64_t>(text.size())});
}

}  // namespace ferry::distckpt
