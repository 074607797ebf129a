// A Layout says, for every tensor of a checkpoint, its dtype, its global shape and which box of it
// lies where. It holds no bytes: a format reader makes one from headers alone, a format writer from
// options alone, and plans are made from two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"

namespace ferry::distckpt {

class ComputedBytes;  // distckpt/plan/box_io.h

// The bytes of a file, raw.
struct FileStorage {
  std::filesystem::path path{};
  std::int64_t size = 0;
};

// One encoded unit of a file: a chunk of an archive (distckpt/execute/plane_codec.h). Placements in
// it address the decoded bytes. Offset and encoded size of a chunk that is still to be written are
// 0.
struct ChunkStorage {
  std::filesystem::path path{};
  std::int64_t offset = 0;
  std::int64_t encoded_size = 0;
  std::int64_t decoded_size = 0;
  std::int64_t element_size = 1;
  std::uint32_t crc = 0;  // that the encoded chunk has to state
  std::string name{};     // "tensors/lm_head.weight[0:512, 0:1024]": its checksum covers this too
  std::string first_tensor{};  // of a chunk that several tensors share: the first and the last
  std::string last_tensor{};
};

// Memory of this process or of a device. The owner keeps it alive for as long as a Layout names it.
struct MemoryStorage {
  std::byte* data = nullptr;
  std::int64_t size = 0;
  int device = -1;  // -1 is the host, else the index of an accelerator
  std::shared_ptr<const void> owner{};
};

// Memory of another rank, of which this one knows no address: its shards, packed, in the order in
// which it names them.
struct RankStorage {
  int rank = 0;
  std::int64_t size = 0;
};

// Bytes that are computed from those of other storages whenever they are read.
struct ComputedStorage {
  std::int64_t size = 0;
  std::shared_ptr<const ComputedBytes> bytes{};
  std::uint32_t index = 0;  // as which it knows them
};

using Storage =
    std::variant<FileStorage, ChunkStorage, MemoryStorage, RankStorage, ComputedStorage>;
using StorageId = std::uint32_t;

std::string describe(const Storage& storage);  // for messages: a file's name, "memory of rank 3"

// The file that it lies in; nothing for memory.
const std::filesystem::path* file_of(const Storage& storage);

// The address of a box: the byte of its first element, and the bytes from one element to the next
// in each dimension.
struct Placement {
  StorageId storage = 0;
  std::int64_t offset = 0;
  Dims strides{};
};

struct Shard {
  Box box{};       // in the tensor's global shape
  Placement at{};  // strides has the rank of box
};

struct TensorLayout {
  std::string name{};
  DType dtype = DType::kBF16;
  Shape shape{};
  std::vector<Shard> shards{};  // tile the shape exactly: check_layout()

  std::int64_t num_bytes() const { return shape.product() * size_of(dtype); }
};

class Layout {
 public:
  StorageId add_storage(Storage storage);

  // Throws Error(kLayout) if a tensor of that name is there already or the shape overflows. The
  // index of the tensor.
  std::uint32_t add_tensor(TensorLayout tensor);

  const std::vector<Storage>& storages() const { return storages_; }
  const std::vector<TensorLayout>& tensors() const { return tensors_; }
  Storage& storage(StorageId id) { return storages_[id]; }
  TensorLayout& tensor(std::uint32_t index) { return tensors_[index]; }
  const TensorLayout& tensor(std::uint32_t index) const { return tensors_[index]; }
  std::optional<std::uint32_t> find(std::string_view name) const;
  std::int64_t num_bytes() const;

 private:
  std::vector<Storage> storages_;
  std::vector<TensorLayout> tensors_;
  std::unordered_map<std::string, std::uint32_t> index_;
};

// Makes the last two dimensions one. Throws Error(kLayout) where a shard does not hold whole ones
// of the last, packed.
void fold_last_dimensions(TensorLayout& tensor);

// A shard that lies row-major and packed from `offset` on.
Shard packed_shard(const Box& box, DType dtype, StorageId storage, std::int64_t offset);

// Throws Error(kLayout) naming the tensor and the first box that no shard holds or that two hold.
void check_layout(const Layout& layout);

}  // namespace ferry::distckpt
