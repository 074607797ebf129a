// The parameters of a mesh over some ranks of a run, without the model: each element's bits are a
// function of the tensor's key and the element's place in it, so that every rank knows what any
// other must hold.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "models/distributed/parallel_state.h"
#include "models/spec/parallel_config.h"
#include "models/spec/transformer_config.h"
#include "models/tensor_parallel/parameters.h"

namespace ferry {

struct BenchMesh {
  models::MeshShape shape;
  std::vector<int> ranks{};  // of the world

  // "tp2pp2vpp2", "ep4", "tp4ep2etp1"; what is not named is 1, expert parallel's width tp.
  static models::ParallelConfig parse(const std::string& text);

  // The place of a rank of the world among `ranks`, -1 if it is none of them.
  int index_of(int rank) const;
  // The parameters of all chunks of ranks[index], first to last, in bf16.
  std::vector<models::ParameterSpec> specs(const models::TransformerConfig& config,
                                           int index) const;
};

class MeshWeights {
 public:
  // The parameters of rank `rank` of the world; it may have none.
  MeshWeights(const models::TransformerConfig& config,
              const BenchMesh& mesh,
              int rank,
              at::Device device);

  const std::vector<models::Parameter>& all() const;
  std::vector<distckpt::LocalShard> sharded_state_dict() const;
  std::vector<std::byte*> addresses() const;

  void fill() const;
  void clear() const;
  // Elements with other bits than fill() would give; of rows of the vocabulary from `padded_vocab`
  // on, others than zero.
  std::int64_t count_unequal(std::int64_t padded_vocab) const;

 private:
  std::optional<models::Parameters> parameters_;
};

}  // namespace ferry
