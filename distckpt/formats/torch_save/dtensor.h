// A rank's part of a tensor that torch.distributed spreads over ranks: a DTensor (placements on a
// mesh of devices) or a ShardedTensor, as torch.save pickles them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/formats/torch_save/torch_save.h"

namespace ferry::distckpt {

// The globals that the pickle of such a file may name.
std::span<const std::string_view> dtensor_globals();

struct RankPart {
  Box box{};  // in the whole tensor
  TensorItem item{};
};

struct RankTensorParts {
  Shape shape{};                  // of the whole tensor
  std::vector<RankPart> parts{};  // none where the rank has no elements

  // Ranks with the same number hold the tensor once between them. Nothing for a plain tensor, which
  // every rank has whole.
  std::optional<std::int64_t> copy{};
};

// Throws Error(kCorrupt | kLayout) naming `name` for anything but a tensor of one of the kinds
// above, and for placements other than Shard and Replicate.
RankTensorParts parse_rank_parts(const TorchFile& file, PickleValue value, std::string_view name);

}  // namespace ferry::distckpt
