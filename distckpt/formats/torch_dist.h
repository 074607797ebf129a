// Sharded checkpoints of torch.distributed.checkpoint (DCP), and Megatron-Core's torch_dist, which
// is one of them: a pickled `.metadata` that says which torch.save archive of which .distcp file
// holds which box of which tensor. docs/formats/torch_dist.md. Nothing in it is ever executed.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/sharded_tensor.h"

namespace ferry::distckpt {

// A torch.save archive inside a .distcp file.
struct TorchDistItem {
  std::uint32_t file = 0;  // index into TorchDistCheckpoint::files
  std::int64_t offset = 0;
  std::int64_t length = 0;
};

struct TorchDistChunk {
  Box box{};
  TorchDistItem item{};
};

struct TorchDistTensor {
  std::string key{};
  DType dtype = DType::kBF16;
  Shape shape{};
  std::vector<TorchDistChunk> chunks{};
};

struct TorchDistObject {
  std::string key{};  // "decoder.layers.mlp.linear_fc1._extra_state/shard_0_4"
  TorchDistItem item{};
};

struct TorchDistCheckpoint {
  std::filesystem::path folder{};
  std::vector<FileStorage> files{};
  std::vector<TorchDistTensor> tensors{};  // sorted by key
  std::vector<TorchDistObject> objects{};  // sorted by key, without the common state
  bool has_common_file = false;
  std::optional<TorchDistItem> common_item{};
  bool is_planned = false;  // has what DCP's own planner leaves: the paths of flattened keys
};

// True for a folder that holds a `.metadata`.
bool is_torch_dist(const std::filesystem::path& folder);

// Reads and checks metadata.json and .metadata: items lie inside their files and do not overlap,
// keys and chunks occur once, chunks tile their tensors. Throws Error(kCorrupt | kNotFound).
TorchDistCheckpoint read_torch_dist(const std::filesystem::path& folder);

// The same of a checkpoint that has no metadata.json, as torch.distributed.checkpoint writes it.
TorchDistCheckpoint read_dcp(const std::filesystem::path& folder);

// The files that `.metadata` names, whether they are there or not. Throws Error(kCorrupt).
std::set<std::string> torch_dist_filenames(const std::filesystem::path& folder);

// The common state: common.pt, which wins, else the object common_state. Nothing if there is
// neither.
std::optional<Pickle> read_common_state(const TorchDistCheckpoint& checkpoint);

// The dict in it: the object is a list of one.
PickleValue common_dict(const Pickle& common_state);

// The pickle that an object holds. Throws Error(kCorrupt).
Pickle read_object(const TorchDistCheckpoint& checkpoint, const TorchDistObject& object);

// Its archive, as it lies in the file.
std::string read_archive(const TorchDistCheckpoint& checkpoint, const TorchDistObject& object);

// Parses the archive of every object, so that a damaged one is found. Throws Error(kCorrupt).
void check_objects(const TorchDistCheckpoint& checkpoint);

// The places of the elements of tensors, found by reading the headers of each chunk's archive, and
// the checksums that those state. Throws Error(kCorrupt) if an archive contradicts .metadata.
struct TorchDistLayout {
  Layout layout{};
  std::vector<ExpectedChecksum> checksums{};
};
TorchDistLayout resolve_layout(const TorchDistCheckpoint& checkpoint,
                               std::span<const TorchDistTensor* const> tensors);

}  // namespace ferry::distckpt
