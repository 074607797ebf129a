#include "distckpt/formats/torch_dist_writer.h"

#include <map>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"

namespace ferry::distckpt {
namespace {

constexpr std::string_view kCheckpointModule = "torch.distributed.checkpoint.metadata.";

std::string checkpoint_class(std::string_view name) {
  return std::string(kCheckpointModule) + std::string(name);
}

// Accepted by every release: those before 0.19 want all four fields and no other.
constexpr std::string_view kConfigText =
    R"({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1})";

}  // namespace

TorchDistTarget::TorchDistTarget(std::filesystem::path folder,
                                 const std::vector<RankState>& ranks,
                                 const std::function<void(PickleWriter&)>& common)
    : folder_(std::move(folder)), extra_state_archive_(ferry::distckpt::extra_state_archive()) {
  PickleWriter listed;
  listed.begin_list();
  common(listed);
  listed.end_list();
  PickleWriter plain;
  common(plain);
  common_file_ = torch_archive(plain.finish(), std::filesystem::path(kCommon).stem().string());

  // A model has few shapes and many experts.
  std::map<std::pair<DType, Shape>, TensorItemLayout> items;
  // First pass: the size of every file, byte items before tensors as torch has them.
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto file = static_cast<StorageId>(file_names_.size());
    std::int64_t position = 0;
    const auto add_object = [&](std::string key, std::string archive) {
      objects_.push_back(
          {.key = std::move(key), .file = file, .offset = position, .archive = std::move(archive)});
      position += static_cast<std::int64_t>(archive_of(objects_.back()).size());
    };
    if (rank == 0) add_object("common_state/shard_0_1", torch_archive(listed.finish()));
    for (const auto& object : ranks[rank].objects) add_object(object.key, object.archive);
    for (const auto& object : ranks[rank].extra_states) add_object(object.unique_key(), "");
    for (const auto& tensor : ranks[rank].tensors) {
      tensor.validate();
      if (!tensor.is_main_replica()) continue;
      const auto box = tensor.box();
      const auto [of_shape, is_new] = items.try_emplace({tensor.dtype, box.size});
      if (is_new) of_shape->second = tensor_item_layout(tensor.dtype, box.size);
      const auto& item = of_shape->second;
      const auto known = layout_.find(tensor.key);
      const auto index = known ? *known
                               : layout_.add_tensor({.name = tensor.key,
                                                     .dtype = tensor.dtype,
                                                     .shape = tensor.global_shape,
                                                     .shards = {}});
      auto& layout = layout_.tensor(index);
      if (layout.dtype != tensor.dtype || layout.shape != tensor.global_shape) {
        fail(ErrorKind::kLayout, "{}: {} {} on rank {}, but {} {} on another", tensor.key,
             short_name(tensor.dtype), to_string(tensor.global_shape), rank,
             short_name(layout.dtype), to_string(layout.shape));
      }
      layout.shards.push_back(packed_shard(box, tensor.dtype, file, position + item.head_bytes));
      chunks_.push_back(
          {.tensor = index, .box = box, .file = file, .offset = position, .item = item});
      position += item.total_bytes();
    }
    if (position == 0) continue;
    file_sizes_.push_back(position);
    file_names_.push_back(distcp_filename(static_cast<int>(rank)));
    layout_.add_storage(FileStorage{.path = folder_ / file_names_.back(), .size = position});
  }
}

const std::string& TorchDistTarget::archive_of(const Object& object) const {
  return object.archive.empty() ? extra_state_archive_ : object.archive;
}

std::vector<ChecksumRange> TorchDistTarget::protected_ranges() const {
  std::vector<ChecksumRange> ranges;
  for (const auto& chunk : chunks_) {
    ranges.push_back({.storage = chunk.file,
                      .offset = chunk.offset + chunk.item.head_bytes,
                      .size = chunk.item.payload_bytes});
  }
  return ranges;
}

std::int64_t TorchDistTarget::num_bytes() const {
  std::int64_t total = 0;
  for (const auto size : file_sizes_) total += size;
  return total;
}

void TorchDistTarget::begin_files(FileSink& sink) const {
  for (const auto& object : objects_) {
    if (sink.writes(object.file))
      sink.write_raw(object.file, object.offset, as_bytes(archive_of(object)));
  }
}

void TorchDistTarget::finish_chunk(FileSink& sink, std::uint32_t index) const {
  const auto& chunk = chunks_.at(index);
  const auto crc = sink.ledger().combined(index);
  if (!crc) {
    fail(ErrorKind::kBug, "{} {} was not written whole", layout_.tensor(chunk.tensor).name,
         to_string(chunk.box));
  }
  sink.write_raw(chunk.file, chunk.offset, as_bytes(chunk.item.head()));
  sink.write_raw(chunk.file, chunk.offset + chunk.item.head_bytes + chunk.item.payload_bytes,
                 as_bytes(chunk.item.tail(*crc)));
}

void TorchDistTarget::finish_files(FileSink& sink) const {
  for (std::uint32_t i = 0; i < chunks_.size(); ++i) {
    if (sink.writes(chunks_[i].file)) finish_chunk(sink, i);
  }
  begin_files(sink);
  sink.sync();
}

void TorchDistTarget::finish_folder() const {
  write_text(folder_ / kTorchDistMetadata, metadata_pickle());
  write_text(folder_ / kCommon, common_file_);
  write_text(folder_ / kTorchDistConfig, kConfigText);
}

// The grammar is in docs/formats/torch_dist.md.
std::string TorchDistTarget::metadata_pickle() const {
  std::vector<std::vector<const Chunk*>> chunks_of(layout_.tensors().size());
  for (const auto& chunk : chunks_) chunks_of[chunk.tensor].push_back(&chunk);

  PickleWriter pickle;
  pickle.begin_object(checkpoint_class("Metadata")).string("state_dict_metadata").begin_dict();
  for (const auto& object : objects_) {
    pickle.string(object.key).begin_call(checkpoint_class("BytesStorageMetadata")).end_call();
  }
  for (std::size_t i = 0; i < layout_.tensors().size(); ++i) {
    const auto& tensor = layout_.tensors()[i];
    pickle.string(tensor.name).begin_object(checkpoint_class("TensorStorageMetadata"));
    pickle.string("properties")
        .begin_object_with_state(checkpoint_class("TensorProperties"))
        .begin_tuple()
        .global("torch." + std::string(torch_name(tensor.dtype)))
        .begin_call("torch.serialization._get_layout")
        .string("torch.strided")
        .end_call()
        .boolean(false)
        .begin_call(checkpoint_class("_MEM_FORMAT_ENCODING"))
        .integer(0)
        .end_call()
        .boolean(false)
        .end_tuple()
        .end_object_with_state();
    pickle.string("size").size(tensor.shape).string("chunks").begin_list();
    for (const auto* chunk : chunks_of[i]) {
      pickle.begin_object(checkpoint_class("ChunkStorageMetadata"))
          .string("offsets")
          .size(chunk->box.offset)
          .string("sizes")
          .size(chunk->box.size)
          .end_object();
    }
    pickle.end_list().end_object();
  }
  pickle.end_dict().string("planner_data").none().string("storage_data").begin_dict();
  const auto add_item = [&](std::string_view key, const Dims* offset, StorageId file,
                            std::int64_t position, std::int64_t length) {
    pickle.begin_object(checkpoint_class("MetadataIndex")).string("fqn").string(key);
    pickle.string("index").none();
    if (offset != nullptr) pickle.string("offset").size(*offset);
    pickle.end_object();
    pickle.begin_object("torch.distributed.checkpoint.filesystem._StorageInfo")
        .string("relative_path")
        .string(file_names_.at(file))
        .string("offset")
        .integer(position)
        .string("length")
        .integer(length)
        .end_object();
  };
  for (const auto& object : objects_) {
    add_item(object.key, nullptr, object.file, object.offset,
             static_cast<std::int64_t>(archive_of(object).size()));
  }
  for (const auto& chunk : chunks_) {
    add_item(layout_.tensor(chunk.tensor).name, &chunk.box.offset, chunk.file, chunk.offset,
             chunk.item.total_bytes());
  }
  pickle.end_dict()
      .string("storage_meta")
      .begin_object(checkpoint_class("StorageMeta"))
      .string("checkpoint_id")
      .none()
      .string("save_id")
      .none()
      .string("load_id")
      .none()
      .string("modules")
      .begin_list()
      .end_list()
      .end_object()
      .string("version")
      .string("1.0.0")
      .end_object();
  return pickle.finish();
}

}  // namespace ferry::distckpt
