// torch.save archives: zip files of stored records that lie anywhere in a larger file. Reading
// checks every header against the others; writing gives the very bytes that torch writes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/storage/file_io.h"

namespace ferry::distckpt {

struct TorchRecord {
  std::string name{};       // "data.pkl", "data/0": without the archive's name
  std::int64_t offset = 0;  // of its bytes, in the file
  std::int64_t size = 0;
  std::uint32_t crc32 = 0;  // 0: the writer computed none (torch can be told to)
};

struct TorchArchive {
  std::string source{};  // the file, for messages
  std::string name{};    // the folder all records share: "archive", "common"
  std::vector<TorchRecord> records{};
  std::vector<std::uint32_t> by_name{};  // indices of records, sorted

  const TorchRecord* find(std::string_view record) const;
  const TorchRecord& at(std::string_view record) const;  // throws Error(kCorrupt)
};

// The archive in bytes [offset, offset + length) of `file`. Throws Error(kCorrupt) naming file,
// byte and record if headers contradict each other, a record leaves the archive or overlaps
// another, is compressed or big endian, or `version` lacks.
TorchArchive read_torch_archive(const ReadFile& file, std::int64_t offset, std::int64_t length);

// Meant for small records. Throws Error(kCorrupt) if the CRC-32 differs.
std::string read_torch_record(const ReadFile& file, const TorchRecord& record);

// One tensor that fills an archive, as checkpoints hold them.
struct TensorItem {
  DType dtype = DType::kBF16;
  Shape shape{};
  Dims strides{};  // in elements
  bool contiguous = true;
  std::int64_t payload_offset = 0;  // of the first element, in the file
  std::int64_t payload_bytes = 0;   // of all elements, were they contiguous
  TorchRecord storage{};  // where they lie: its CRC-32 covers the payload if it is as large
};

// Reads the first and last 4 KiB of the archive, and more only where those do not hold all headers.
// Every element lies inside the storage: a caller may read [payload_offset, payload_offset +
// payload_bytes) if `contiguous`.
TensorItem parse_tensor_item(const ReadFile& file, std::int64_t offset, std::int64_t length);

// Its data.pkl: what torch.load would build, storages as persistent ids.
Pickle read_torch_object(const ReadFile& file,
                         std::int64_t offset,
                         std::int64_t length,
                         std::span<const std::string_view> allowed_globals);

// The archive of one contiguous tensor: head, payload, tail. Sizes depend on dtype and shape alone,
// so every item of a file can be placed before any byte is written.
struct TensorItemLayout {
  DType dtype = DType::kBF16;
  Shape shape{};
  std::int64_t head_bytes = 0;
  std::int64_t payload_bytes = 0;
  std::int64_t tail_bytes = 0;

  std::int64_t total_bytes() const { return head_bytes + payload_bytes + tail_bytes; }
  std::string head() const;
  std::string tail(std::uint32_t payload_crc32) const;
};

TensorItemLayout tensor_item_layout(DType dtype, const Shape& shape);

struct TorchStorage {
  std::string_view key{};  // "0"
  std::string_view bytes{};
};

// A whole archive. `name` is "archive" inside checkpoints, the stem of the file's name in a file of
// its own.
std::string torch_archive(std::string_view data_pkl,
                          std::string_view name = "archive",
                          std::span<const TorchStorage> storages = {});

// A list of one empty tensor of bytes: what Transformer Engine layers expect to find as their
// _extra_state.
std::string extra_state_archive();

}  // namespace ferry::distckpt
