// A stand-in for a parallel model: the shards of every rank of a mesh, in host memory. And what
// must lie in them, cut out of Hugging Face files without the planner, the tables or the readers.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "converter/bridge/load.h"
#include "converter/families/model_map.h"
#include "converter/open/checkpoint.h"
#include "converter/optimizer/sharded_state.h"
#include "distckpt/base/dtype.h"
#include "distckpt/plan/mesh_layout.h"
#include "distckpt/plan/rank_group.h"
#include "distckpt/plan/sharded_tensor.h"
#include "models/spec/parallel_config.h"

namespace ferry::support {

struct MeshOptions {
  models::ParallelConfig parallel{};
  int dp = 1;
  bool by_rows = false;      // what is split by columns of the weight is split by rows
  bool stored_head = false;  // a tied output layer has memory of its own
  bool transposed = false;   // matrices lie column after column
  std::optional<distckpt::DType> dtype{};  // default: as in the checkpoint
  std::vector<std::string> optimizer{};    // kinds of its state that the ranks hold, in fp32
};

class ParallelModel {
 public:
  // The dtypes are those of `tensors`, of the map.
  ParallelModel(const converter::ModelMap& map,
                const std::vector<distckpt::ModelTensor>& tensors,
                const MeshOptions& options);

  int size() const { return static_cast<int>(shards_.size()); }
  const std::vector<distckpt::LocalShard>& sharded_state_dict(int rank) const {
    return shards_.at(static_cast<std::size_t>(rank));
  }
  distckpt::MeshLayout mesh(int rank) const;  // without a group

  // Runs `body` as every rank, each with the mesh as the group has gathered it.
  void run(const std::function<void(const distckpt::RankGroup&, const distckpt::MeshLayout&)>& body)
      const;

 private:
  void add_rank(std::size_t rank,
                const std::vector<converter::RankTensor>& tensors,
                const MeshOptions& options,
                int copy);
  void add_shard(std::size_t rank, distckpt::ShardedTensor tensor, bool transposed);

  const converter::ModelMap& map_;
  const std::vector<distckpt::ModelTensor>& tensors_;
  std::vector<std::vector<distckpt::LocalShard>> shards_;
};

// The bytes of a shard, row-major.
std::vector<std::byte> packed_bytes(const distckpt::LocalShard& shard);

// The weights of a Hugging Face folder, as Megatron's modules hold them.
class NaiveWeights {
 public:
  NaiveWeights(const std::filesystem::path& folder, const models::TransformerConfig& config);

  // The bytes that a shard must hold. Throws std::out_of_range for a key that is none.
  std::vector<std::byte> expected(const distckpt::ShardedTensor& tensor) const;

 private:
  struct Weight {
    distckpt::DType dtype = distckpt::DType::kBF16;
    std::vector<std::byte> bytes{};
  };
  Weight whole(const std::string& key) const;
  Weight rows_of(const std::vector<std::string>& names) const;
  Weight interleaved(const std::string& prefix, const std::string& what) const;

  models::TransformerConfig config_;
  std::map<std::string, Weight> weights_;
};

// Every byte of the shards is that of the weights.
void expect_holds(const std::vector<distckpt::LocalShard>& shards, const NaiveWeights& weights);

// Meshes of every kind that a real checkpoint of tests/data can be split over.
std::vector<MeshOptions> meshes_for(const models::TransformerConfig& config);

converter::LoadReport load_rank(const converter::Checkpoint& checkpoint,
                                const ParallelModel& model,
                                int rank,
                                const converter::LoadOptions& options = {.threads = 1});

// Loads every rank and looks at every byte of it.
void expect_loads(const converter::Checkpoint& checkpoint,
                  const NaiveWeights& weights,
                  const MeshOptions& options);

}  // namespace ferry::support
