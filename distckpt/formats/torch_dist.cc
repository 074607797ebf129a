#include "distckpt/formats/torch_dist.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/formats/torch_save/torch_save.h"
#include "distckpt/formats/torch_save/torch_tensor.h"
#include "distckpt/formats/torch_save/torch_zip.h"
#include "distckpt/plan/coverage.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::distckpt {
namespace {

using namespace std::string_view_literals;

constexpr auto kCommonStateKey = "common_state/shard_0_1"sv;

constexpr std::array kMetadataGlobals{
    "torch.distributed.checkpoint.metadata."sv,
    "torch.distributed.checkpoint.planner."sv,
    "torch.distributed.checkpoint.filesystem._StorageInfo"sv,
    "torch.distributed.checkpoint.filesystem.StorageMeta"sv,
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"sv,
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan"sv,
    "torch.Size"sv,
    "torch.serialization._get_layout"sv,
    "torch.bool"sv,
    "torch.uint8"sv,
    "torch.int8"sv,
    "torch.int16"sv,
    "torch.int32"sv,
    "torch.int64"sv,
    "torch.float8_e4m3fn"sv,
    "torch.float8_e5m2"sv,
    "torch.float16"sv,
    "torch.bfloat16"sv,
    "torch.float32"sv,
    "torch.float64"sv,
    "collections.OrderedDict"sv,
    "pathlib.PosixPath"sv,
    "pathlib._local.PosixPath"sv,
    "builtins.set"sv,
    "builtins.frozenset"sv,
};

constexpr auto kMetadataClass = "torch.distributed.checkpoint.metadata.Metadata"sv;
constexpr auto kMCoreMetadataClass =
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"sv;
constexpr auto kTensorClass = "torch.distributed.checkpoint.metadata.TensorStorageMetadata"sv;
constexpr auto kBytesClass = "torch.distributed.checkpoint.metadata.BytesStorageMetadata"sv;

void check_config(const std::filesystem::path& path) {
  const auto source = path.string();
  const auto json = parse_json(read_text(path, 1 << 20), source);
  const auto backend = json_string_at(json, "sharded_backend", source);
  require(backend == "torch_dist", ErrorKind::kLayout,
          "{}: sharded_backend is \"{}\", only \"torch_dist\" is read", source, backend);
  for (const auto& [key, value] : json.items()) {
    const bool version = key == "sharded_backend_version" || key == "common_backend_version";
    const bool known =
        version ? value == 1
                : key == "sharded_backend" || (key == "common_backend" && value == "torch");
    require(known, ErrorKind::kCorrupt, "{}: \"{}\": {} is not known", source, key, value.dump());
  }
}

Dims required_size(PickleValue value,
                   std::string_view what,
                   const std::string& key,
                   const std::string& source) {
  const auto size = as_size(value);
  require(size.has_value(), ErrorKind::kCorrupt,
          "{}: {}: {} is {}, not a torch.Size of at most {} dimensions", source, key, what,
          value.describe(), kMaxRank);
  return *size;
}

DType tensor_dtype(PickleValue properties, const std::string& key, const std::string& source) {
  const auto state = properties.object_state();
  const auto dtype = state.kind() == PickleKind::kTuple ? state[0] : state.at("dtype");
  const auto name = dtype.global_name();
  constexpr auto kPrefix = "torch."sv;
  const auto known = dtype_from_torch(name.substr(std::min(kPrefix.size(), name.size())));
  require(known && name.starts_with(kPrefix), ErrorKind::kCorrupt, "{}: {}: unknown dtype {}",
          source, key, name);
  return *known;
}

// The name of an item in storage_data: its key and, for tensors, its offset.
using ItemKey = std::pair<std::string_view, std::optional<Dims>>;

struct ItemKeyLess {
  bool operator()(const ItemKey& a, const ItemKey& b) const {
    if (a.first != b.first) return a.first < b.first;
    if (a.second.has_value() != b.second.has_value()) return b.second.has_value();
    return a.second && *a.second < *b.second;
  }
};

class MetadataReader {
 public:
  explicit MetadataReader(const std::filesystem::path& folder)
      : source_((folder / kTorchDistMetadata).string()),
        pickle_(Pickle::parse(read_text(folder / kTorchDistMetadata, std::int64_t{8} << 30),
                              {.source = source_, .allowed_globals = kMetadataGlobals})) {
    checkpoint_.folder = folder;
  }

  std::set<std::string> filenames() const {
    std::set<std::string> names;
    for (const auto& [_, info] : metadata().at("storage_data").items()) {
      const auto name = info.at("relative_path").as_string();
      require_plain_filename(name, source_);
      names.emplace(name);
    }
    return names;
  }

  TorchDistCheckpoint read() {
    const auto root = metadata();
    const auto planner_data = root.find("planner_data");
    checkpoint_.is_planned = planner_data && !planner_data->is_none();
    read_items(root.at("storage_data"));
    const auto entries = root.at("state_dict_metadata");
    std::map<std::string_view, bool> seen;
    for (const auto& [key_value, value] : entries.items()) {
      const auto key = key_value.as_string();
      require(seen.emplace(key, true).second, ErrorKind::kCorrupt, "{}: {}: the key occurs twice",
              source_, key);
      if (value.is_object(kTensorClass)) {
        read_tensor(std::string(key), value);
      } else {
        require(value.is_object(kBytesClass), ErrorKind::kCorrupt, "{}: {}: is {}", source_, key,
                value.describe());
        read_object(std::string(key));
      }
    }
    require(items_.empty(), ErrorKind::kCorrupt,
            "{}: storage_data holds {} items of no tensor, {} among them", source_, items_.size(),
            items_.empty() ? "" : items_.begin()->first.first);
    check_overlaps();
    std::ranges::sort(checkpoint_.tensors, {}, &TorchDistTensor::key);
    std::ranges::sort(checkpoint_.objects, {}, &TorchDistObject::key);
    return std::move(checkpoint_);
  }

 private:
  PickleValue metadata() const {
    const auto root = pickle_.root();
    require(root.is_object(kMetadataClass) || root.is_object(kMCoreMetadataClass),
            ErrorKind::kCorrupt, "{}: holds {}, not the Metadata of a distributed checkpoint",
            source_, root.describe());
    return root;
  }

  void read_items(PickleValue storage_data) {
    for (const auto& [index, info] : storage_data.items()) {
      const auto key = index.at("fqn").as_string();
      const auto offset = index.object_state().find("offset");
      ItemKey item_key{key, std::nullopt};
      if (offset && !offset->is_none()) {
        item_key.second = required_size(*offset, "offset", std::string(key), source_);
      }
      const auto transforms = info.object_state().find("transform_descriptors");
      require(!transforms || transforms->is_none() || transforms->size() == 0, ErrorKind::kLayout,
              "{}: {}: is stored transformed ({}), which is not read", source_, key,
              transforms ? transforms->describe() : "");
      const TorchDistItem item{.file = file_index(info.at("relative_path").as_string()),
                               .offset = info.at("offset").as_int(),
                               .length = info.at("length").as_int()};
      const auto& file = checkpoint_.files[item.file];
      require(item.offset >= 0 && item.length >= 0 && item.offset <= file.size &&
                  item.length <= file.size - item.offset,
              ErrorKind::kCorrupt, "{}: {}: bytes {} to {} of {} are beyond its end at byte {}",
              source_, key, item.offset,
              static_cast<std::uint64_t>(item.offset) + static_cast<std::uint64_t>(item.length),
              file.path.filename().string(), file.size);
      require(items_.emplace(item_key, item).second, ErrorKind::kCorrupt,
              "{}: {}: storage_data has the same item twice", source_, key);
    }
  }

  std::uint32_t file_index(std::string_view name) {
    const auto found = files_.find(name);
    if (found != files_.end()) return found->second;
    require_plain_filename(name, source_);
    const auto path = checkpoint_.folder / name;
    const auto index = static_cast<std::uint32_t>(checkpoint_.files.size());
    const auto size = with_context([&] { return fmt::format("reading {}", source_); },
                                   [&] { return ReadFile(path).size(); });
    checkpoint_.files.push_back({.path = path, .size = size});
    files_.emplace(name, index);
    return index;
  }

  TorchDistItem take_item(const ItemKey& key) {
    const auto found = items_.find(key);
    require(found != items_.end(), ErrorKind::kCorrupt,
            "{}: {}{}: storage_data does not say where it lies", source_, key.first,
            key.second ? " at " + to_string(*key.second) : "");
    const auto item = found->second;
    items_.erase(found);
    return item;
  }

  void read_tensor(std::string key, PickleValue value) {
    TorchDistTensor tensor{.key = key,
                           .dtype = tensor_dtype(value.at("properties"), key, source_),
                           .shape = required_size(value.at("size"), "size", key, source_)};
    const auto volume = checked_volume(tensor.shape);
    std::int64_t bytes = 0;
    require(volume && !__builtin_mul_overflow(*volume, size_of(tensor.dtype), &bytes),
            ErrorKind::kCorrupt, "{}: {}: the shape {} overflows", source_, key,
            to_string(tensor.shape));
    std::vector<Box> boxes;
    for (const auto chunk : value.at("chunks").elements()) {
      const Box box{.offset = required_size(chunk.at("offsets"), "offsets", key, source_),
                    .size = required_size(chunk.at("sizes"), "sizes", key, source_)};
      require(box.inside(tensor.shape), ErrorKind::kCorrupt,
              "{}: {}: the chunk {} leaves the shape {}", source_, key, to_string(box),
              to_string(tensor.shape));
      tensor.chunks.push_back({.box = box, .item = take_item({key, box.offset})});
      boxes.push_back(box);
    }
    if (const auto defect = find_coverage_defect(tensor.shape, boxes)) {
      fail(ErrorKind::kCorrupt,
           "{}: {}: elements {} of shape {} are stored {} times, expected once", source_, key,
           to_string(defect->box), to_string(tensor.shape), defect->times);
    }
    checkpoint_.tensors.push_back(std::move(tensor));
  }

  void read_object(std::string key) {
    const auto item = take_item({key, std::nullopt});
    if (key == kCommonStateKey) {
      checkpoint_.common_item = item;
    } else {
      checkpoint_.objects.push_back({.key = std::move(key), .item = item});
    }
  }

  // Two chunks that claim the same bytes: one of them is not where .metadata says.
  void check_overlaps() const {
    std::vector<std::pair<TorchDistItem, const std::string*>> all;
    for (const auto& tensor : checkpoint_.tensors) {
      for (const auto& chunk : tensor.chunks) all.emplace_back(chunk.item, &tensor.key);
    }
    for (const auto& object : checkpoint_.objects) all.emplace_back(object.item, &object.key);
    const std::string common(kCommonStateKey);
    if (checkpoint_.common_item) all.emplace_back(*checkpoint_.common_item, &common);
    std::ranges::sort(all, {},
                      [](const auto& one) { return std::pair(one.first.file, one.first.offset); });
    for (std::size_t i = 0; i + 1 < all.size(); ++i) {
      const auto& [item, key] = all[i];
      const auto& [next, next_key] = all[i + 1];
      require(item.file != next.file || item.offset + item.length <= next.offset,
              ErrorKind::kCorrupt, "{}: {} and {} both lie at byte {} of {}", source_, *key,
              *next_key, next.offset, checkpoint_.files[next.file].path.filename().string());
    }
  }

  std::string source_;
  Pickle pickle_;
  TorchDistCheckpoint checkpoint_;
  std::map<std::string, std::uint32_t, std::less<>> files_;
  std::map<ItemKey, TorchDistItem, ItemKeyLess> items_;
};

// For errors in an item's bytes, which may lie elsewhere than .metadata says.
std::string place(const TorchDistCheckpoint& checkpoint, std::string_view item) {
  return fmt::format("reading {} at the place that {} gives it", item,
                     (checkpoint.folder / kTorchDistMetadata).string());
}

}  // namespace

bool is_torch_dist(const std::filesystem::path& folder) {
  return source_is_file(folder / kTorchDistMetadata);
}

TorchDistCheckpoint read_torch_dist(const std::filesystem::path& folder) {
  check_config(folder / kTorchDistConfig);
  auto checkpoint = MetadataReader(folder).read();
  checkpoint.has_common_file = source_exists(folder / kCommon);
  return checkpoint;
}

TorchDistCheckpoint read_dcp(const std::filesystem::path& folder) {
  return MetadataReader(folder).read();
}

std::set<std::string> torch_dist_filenames(const std::filesystem::path& folder) {
  return MetadataReader(folder).filenames();
}

std::optional<Pickle> read_common_state(const TorchDistCheckpoint& checkpoint) {
  if (checkpoint.has_common_file) {
    const ReadFile file(checkpoint.folder / kCommon);
    return read_torch_object(file, 0, file.size(), object_globals());
  }
  if (!checkpoint.common_item) return std::nullopt;
  const auto& item = *checkpoint.common_item;
  return read_torch_object(ReadFile(checkpoint.files[item.file].path), item.offset, item.length,
                           object_globals());
}

PickleValue common_dict(const Pickle& common_state) {
  const auto root = common_state.root();
  return root.kind() == PickleKind::kList && root.size() == 1 ? root[0] : root;
}

Pickle read_object(const TorchDistCheckpoint& checkpoint, const TorchDistObject& object) {
  const auto& item = object.item;
  return with_context([&] { return place(checkpoint, object.key); },
                      [&] {
                        return read_torch_object(ReadFile(checkpoint.files[item.file].path),
                                                 item.offset, item.length, object_globals());
                      });
}

std::string read_archive(const TorchDistCheckpoint& checkpoint, const TorchDistObject& object) {
  constexpr std::int64_t kMaxArchive = std::int64_t{1} << 28;
  const auto& item = object.item;
  const auto& path = checkpoint.files[item.file].path;
  require(item.length <= kMaxArchive, ErrorKind::kCorrupt, "{}: {} has {} bytes", path.string(),
          object.key, item.length);
  std::string archive(static_cast<std::size_t>(item.length), '\0');
  ReadFile(path).read_at(item.offset, std::as_writable_bytes(std::span(archive)));
  return archive;
}

void check_objects(const TorchDistCheckpoint& checkpoint) {
  std::vector<std::unique_ptr<ReadFile>> files(checkpoint.files.size());
  const auto check = [&](const TorchDistItem& item) {
    auto& file = files[item.file];
    if (!file) file = std::make_unique<ReadFile>(checkpoint.files[item.file].path);
    read_torch_object(*file, item.offset, item.length, object_globals());
    for (const auto& record : read_torch_archive(*file, item.offset, item.length).records) {
      read_torch_record(*file, record);
    }
  };
  for (const auto& object : checkpoint.objects) {
    with_context([&] { return place(checkpoint, object.key); }, [&] { check(object.item); });
  }
  if (checkpoint.common_item) {
    with_context([&] { return place(checkpoint, kCommonStateKey); },
                 [&] { check(*checkpoint.common_item); });
  }
}

TorchDistLayout resolve_layout(const TorchDistCheckpoint& checkpoint,
                               std::span<const TorchDistTensor* const> tensors) {
  TorchDistLayout resolved;
  std::vector<std::unique_ptr<ReadFile>> files(checkpoint.files.size());
  for (const auto& file : checkpoint.files) resolved.layout.add_storage(file);
  for (const auto* tensor : tensors) {
    TensorLayout layout{
        .name = tensor->key, .dtype = tensor->dtype, .shape = tensor->shape, .shards = {}};
    for (const auto& chunk : tensor->chunks) {
      const auto& item = chunk.item;
      auto& file = files[item.file];
      if (!file) file = std::make_unique<ReadFile>(checkpoint.files[item.file].path);
      const auto parsed =
          with_context([&] { return place(checkpoint, tensor->key + " " + to_string(chunk.box)); },
                       [&] { return parse_tensor_item(*file, item.offset, item.length); });
      require(parsed.dtype == tensor->dtype && parsed.shape == chunk.box.size, ErrorKind::kCorrupt,
              "{}: byte {}: holds {} {}, but .metadata says {} {} ({})",
              checkpoint.files[item.file].path.string(), item.offset, torch_name(parsed.dtype),
              to_string(parsed.shape), torch_name(tensor->dtype), to_string(chunk.box.size),
              tensor->key);
      layout.shards.push_back(shard_of(parsed, chunk.box, item.file));
      auto checksum =
          checksum_of(parsed, item.file, fmt::format("{} {}", tensor->key, to_string(chunk.box)));
      if (checksum) resolved.checksums.push_back(std::move(*checksum));
    }
    resolved.layout.add_tensor(std::move(layout));
  }
  return resolved;
}

}  // namespace ferry::distckpt
