// Reads the pickle of a tensor: which records of its archive hold which of its elements.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "distckpt/execute/file_box_io.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/formats/torch_save/torch_zip.h"
#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

// "torch.FloatStorage" -> "FloatStorage"
std::string_view last_component(std::string_view name);

// The globals that such a pickle may name.
std::span<const std::string_view> tensor_globals();

// True if torch.load would build a plain tensor or a parameter of it.
bool is_tensor(PickleValue value);

// Throws Error(kCorrupt) naming the byte, unless `value` is a tensor whose elements all lie inside
// its storage.
TensorItem parse_tensor(PickleValue value, const TorchArchive& archive);

// The elements of `item`, as `box` of a larger tensor. Both are of one shape.
Shard shard_of(const TensorItem& item, const Box& box, StorageId storage);

// The checksum of the tensor by its record's CRC-32; nothing unless it fills the record.
std::optional<ExpectedChecksum> checksum_of(const TensorItem& item,
                                            StorageId storage,
                                            std::string name);

}  // namespace ferry::distckpt
