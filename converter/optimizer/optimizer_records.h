// The names under which Megatron-Core's distributed optimizer keeps what belongs to one model
// parallel rank, and the buffers that it gathers into one object for each.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/formats/torch_dist.h"

namespace ferry::converter {

// Without "chained_1." before it, which tells the optimizers of dense parameters and of experts
// apart; the number, or 0.
int strip_chain(std::string_view& key);

// [chained_C.]optimizer.distributed.dp_group_idx_M.
struct GroupKey {
  int optimizer = 0;  // C
  int rank = 0;       // M, model parallel
};

// "<group>.<name>/shard_0_1"; nothing for other keys.
std::optional<GroupKey> parse_group_key(std::string_view key, std::string_view name);

// "<group>.gbuf_idx_B.dtype_(P, G).bucket_idx_K.<kind>"
struct BucketKey {
  GroupKey group{};
  int buffer = 0;
  int bucket = 0;
  std::string kind{};
};
std::optional<BucketKey> parse_bucket_key(std::string_view key);

// One buffer of an object param_state: DistributedOptimizer.get_parameter_state_dp_zero().
struct GatheredBuffer {
  int buffer = 0;
  std::int64_t size = 0;  // elements
  struct At {
    distckpt::StorageId storage = 0;
    std::int64_t offset = 0;  // of the first element
  };
  std::map<std::string, At> kinds{};
};

// Throws Error(kCorrupt | kLayout) if the object is none, or of a form from before 2024.
std::vector<GatheredBuffer> read_gathered_buffers(const distckpt::TorchDistCheckpoint& checkpoint,
                                                  const distckpt::TorchDistObject& object);

}  // namespace ferry::converter
