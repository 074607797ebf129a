#include "distckpt/formats/archive/shard_store_index.h"

#include <set>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::distckpt {
namespace {

using nlohmann::json;

// The most bytes of one decoded chunk: nobody writes larger ones, and a reader's memory is bounded
// by it.
constexpr std::int64_t kMaxChunkBytes = std::int64_t{64} << 20;

json to_json(const Dims& dims) {
  auto array = json::array();
  for (const auto size : dims) array.push_back(size);
  return array;
}

class IndexReader {
 public:
  IndexReader(const std::string& what, std::uint32_t file, ShardStoreLayout& store)
      : what_(what + ": index"), file_(file), store_(store) {}

  ShardStoreContents read(std::string_view text, std::size_t num_files, std::size_t num_chunks) {
    const auto index = parse_json(text, what_);
    require_json_format(index, kShardStoreFormat, what_);
    require(integer(index, "file") == file_ &&
                integer(index, "files") == static_cast<std::int64_t>(num_files),
            ErrorKind::kCorrupt,
            "{}: says that it is file {} of {}, counted from 0, expected {} of {}", what_,
            integer(index, "file"), integer(index, "files"), file_, num_files);
    const auto first_dataset = store_.datasets.size();
    std::int64_t chunks_left = static_cast<std::int64_t>(num_chunks);
    for (const auto& dataset : array(index, "datasets")) add_dataset(dataset, chunks_left);
    require(chunks_left == 0, ErrorKind::kCorrupt, "{}: has {} chunks fewer than the trailer",
            what_, chunks_left);
    uses_.assign(store_.datasets.size() - first_dataset, 0);
    for (const auto& tensor : array(index, "tensors")) add_tensor(tensor, first_dataset);
    for (std::size_t i = 0; i < uses_.size(); ++i) {
      const auto& dataset = store_.datasets[first_dataset + i];
      require(uses_[i] > 0 && (dataset.is_slab() || uses_[i] == 1), ErrorKind::kCorrupt,
              "{}: {} tensors lie in {}", what_, uses_[i], dataset.path);
    }
    return contents(index);
  }

 private:
  std::int64_t integer(const json& object, std::string_view key) const {
    return json_int(json_at(object, key, what_), key, what_);
  }

  const json& array(const json& object, std::string_view key) const {
    const auto& value = json_at(object, key, what_);
    require(value.is_array(), ErrorKind::kCorrupt, "{}: {}: is not a list", what_, key);
    return value;
  }

  Dims dims(const json& object, std::string_view key, const std::string& name) const {
    auto result = json_dims_at(object, key, fmt::format("{}: {}", what_, name));
    for (const auto size : result)
      require(size <= (std::int64_t{1} << 62), ErrorKind::kCorrupt, "{}: {}: has a dimension of {}",
              what_, name, size);
    return result;
  }

  void add_dataset(const json& entry, std::int64_t& chunks_left) {
    StoredDataset dataset{.path = json_string_at(entry, "path", what_), .file = file_};
    const auto& path = dataset.path;
    require(paths_.insert(path).second, ErrorKind::kCorrupt, "{}: {} is there twice", what_, path);
    const auto dtype_name = json_string_at(entry, "dtype", what_);
    const auto dtype = dtype_from_safetensors(dtype_name);
    require(dtype.has_value(), ErrorKind::kCorrupt, "{}: {}: unknown dtype \"{}\"", what_, path,
            dtype_name);
    dataset.dtype = *dtype;
    dataset.shape = dims(entry, "shape", path);
    dataset.chunk = dims(entry, "chunk", path);
    require(dataset.shape.rank() == dataset.chunk.rank() && dataset.shape.rank() > 0,
            ErrorKind::kCorrupt, "{}: {}: shape {}, but chunks {}", what_, path,
            to_string(dataset.shape), to_string(dataset.chunk));
    std::int64_t bytes = size_of(dataset.dtype);
    for (const auto size : dataset.chunk) {
      require(size > 0 && size <= kMaxChunkBytes / bytes, ErrorKind::kCorrupt,
              "{}: {}: chunks {} are larger than {} bytes, or empty", what_, path,
              to_string(dataset.chunk), kMaxChunkBytes);
      bytes *= size;
    }
    const auto count = checked_volume(dataset.grid());
    require(count && *count <= chunks_left && checked_volume(dataset.shape), ErrorKind::kCorrupt,
            "{}: {}: has more chunks than the trailer", what_, path);
    chunks_left -= *count;
    store_.datasets.push_back(std::move(dataset));
  }

  void add_tensor(const json& entry, std::size_t first_dataset) {
    StoredTensor tensor{.name = json_string_at(entry, "name", what_)};
    const auto& name = tensor.name;
    const auto at = integer(entry, "dataset");
    require(at >= 0 && static_cast<std::size_t>(at) < uses_.size(), ErrorKind::kCorrupt,
            "{}: {}: lies in dataset {} of {}", what_, name, at, uses_.size());
    ++uses_[static_cast<std::size_t>(at)];
    tensor.dataset = static_cast<std::uint32_t>(first_dataset + static_cast<std::size_t>(at));
    tensor.shape = dims(entry, "shape", name);
    tensor.begin = integer(entry, "begin");
    const auto elements = checked_volume(tensor.shape);
    require(elements.has_value(), ErrorKind::kCorrupt, "{}: {}: the shape {} overflows", what_,
            name, to_string(tensor.shape));
    const auto& dataset = store_.datasets[tensor.dataset];
    if (dataset.is_slab()) {
      const auto length = dataset.shape.rank() == 1 ? dataset.shape[0] : 0;
      require(tensor.begin >= 0 && *elements <= length && tensor.begin <= length - *elements &&
                  (*elements == 0 || tensor.begin / dataset.chunk[0] ==
                                         (tensor.begin + *elements - 1) / dataset.chunk[0]),
              ErrorKind::kCorrupt, "{}: {}: elements {} and {} more do not lie in one chunk of {}",
              what_, name, tensor.begin, *elements, dataset.path);
    } else {
      require(
          tensor.begin == 0 && dataset.shape == tensor.shape && dataset.path == tensor_path(name),
          ErrorKind::kCorrupt, "{}: {}: has shape {}, but its dataset {} has {}", what_, name,
          to_string(tensor.shape), dataset.path, to_string(dataset.shape));
    }
    store_.tensors.push_back(std::move(tensor));
  }

  ShardStoreContents contents(const json& index) const {
    ShardStoreContents contents;
    const auto& files = json_at(index, "small_files", what_);
    require(files.is_object(), ErrorKind::kCorrupt, "{}: small_files: is not an object", what_);
    for (const auto& [name, range] : files.items()) {
      require(range.is_array() && range.size() == 2, ErrorKind::kCorrupt,
              "{}: {}: is not a range of bytes", what_, name);
      contents.small_files[name] = {.begin = json_int(range[0], name, what_),
                                    .end = json_int(range[1], name, what_)};
    }
    for (const auto& trailer : array(index, "trailers"))
      contents.trailers.push_back(json_string(trailer, "trailers", what_));
    return contents;
  }

  std::string what_;
  std::uint32_t file_;
  ShardStoreLayout& store_;
  std::set<std::string> paths_;
  std::vector<std::size_t> uses_;  // by tensors, of the file's datasets
};

}  // namespace

std::string make_index(const ShardStoreLayout& store,
                       std::uint32_t file,
                       const ShardStoreContents& contents) {
  json index = {{"format", kShardStoreFormat},  {"file", file},
                {"files", store.files.size()},  {"datasets", json::array()},
                {"tensors", json::array()},     {"small_files", json::object()},
                {"trailers", contents.trailers}};
  std::vector<std::size_t> position(store.datasets.size());  // in the file
  for (std::size_t i = 0; i < store.datasets.size(); ++i) {
    const auto& dataset = store.datasets[i];
    if (dataset.file != file) continue;
    position[i] = index["datasets"].size();
    index["datasets"].push_back({{"path", dataset.path},
                                 {"dtype", std::string(safetensors_name(dataset.dtype))},
                                 {"shape", to_json(dataset.shape)},
                                 {"chunk", to_json(dataset.chunk)}});
  }
  for (const auto& tensor : store.tensors) {
    if (store.datasets[tensor.dataset].file != file) continue;
    index["tensors"].push_back({{"name", tensor.name},
                                {"shape", to_json(tensor.shape)},
                                {"dataset", position[tensor.dataset]},
                                {"begin", tensor.begin}});
  }
  for (const auto& [name, range] : contents.small_files)
    index["small_files"][name] = {range.begin, range.end};
  return index.dump();
}

ShardStoreContents read_index(std::string_view text,
                              std::uint32_t file,
                              std::size_t num_files,
                              std::size_t num_chunks,
                              const std::string& what,
                              ShardStoreLayout& store) {
  return IndexReader(what, file, store).read(text, num_files, num_chunks);
}

}  // namespace ferry::distckpt
