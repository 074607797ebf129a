#include "converter/optimizer/sharded_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "distckpt/base/error.h"
#include "models/spec/pipeline_stages.h"
#include "models/spec/sharding.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::ShardedTensor;
using models::MeshSize;
using models::ParallelConfig;
using models::TransformerConfig;

// Throws Error(kUsage) that says what cannot be split, and over how many ranks it can.
void require_divisible(const TransformerConfig& config, const ParallelConfig& parallel) {
  const auto find = [&](const ParallelConfig& sizes) {
    return models::find_indivisible(config, sizes, models::Alignment::kFast);
  };
  const auto found = find(parallel);
  if (!found) return;
  const auto name = models::name_of(found->size);
  const auto with = [&](int size) {
    auto changed = parallel;
    switch (found->size) {
      case MeshSize::kTp:
        changed.tensor_model_parallel_size = size;
        break;
      case MeshSize::kEp:
        changed.expert_model_parallel_size = size;
        break;
      case MeshSize::kEtp:
        changed.expert_tensor_parallel_size = size;
        break;
    }
    return changed;
  };
  std::vector<int> possible;
  const auto most =
      std::max({config.num_attention_heads, config.num_moe_experts, config.moe_ffn_hidden_size});
  for (int size = 1; size <= most && possible.size() < 16; ++size) {
    const auto other = find(with(size));
    if (!other || other->size != found->size) possible.push_back(size);
  }
  const auto asked = found->size == MeshSize::kTp   ? parallel.tensor_model_parallel_size
                     : found->size == MeshSize::kEp ? parallel.expert_model_parallel_size
                                                    : parallel.expert_tensor_parallel();
  throw Error(
      ErrorKind::kUsage, fmt::format("--{} {}: {} cannot be split so", name, asked, found->what),
      possible.empty() ? "" : fmt::format("possible: --{} {}", name, fmt::join(possible, ", ")));
}

// The ranks of a mesh without data parallelism, and what each holds of a model.
class Ranks {
 public:
  Ranks(const ModelMap& map, ParallelConfig parallel)
      : map_(map), mesh_(fewest_ranks(map.config, std::move(parallel))) {
    const auto& config = map.config;
    stages_ = pipeline_stages(mesh_.parallel(), static_cast<int>(config.num_layers),
                              static_cast<int>(config.mtp_num_layers));
  }

  std::vector<std::vector<RankTensor>> tensors() const {
    std::vector<std::vector<RankTensor>> ranks(size());
    for (std::uint32_t i = 0; i < map_.megatron.size(); ++i) {
      const auto& tensor = map_.megatron[i];
      const auto [stage, chunk] = place_of(tensor.stage, tensor.layer);
      each_rank_of(stage, [&](std::size_t rank, const models::MeshCoordinates& at) {
        auto spec = models::shard(tensor, map_.config, mesh_, at, {});
        if (!spec) return;
        ranks[rank].push_back({.megatron = i,
                               .chunk = chunk,
                               .shape = spec->global_shape,
                               .boxes = std::move(spec->boxes),
                               .replica_id = std::move(spec->replica_id)});
      });
    }
    return ranks;
  }

  // The first rank of each stage writes its states, and those of experts the first that has them.
  std::vector<std::vector<distckpt::ShardedObject>> extra_states() const {
    std::vector<std::vector<distckpt::ShardedObject>> ranks(size());
    for (const auto& state : map_.extra_states) {
      each_rank_of(place_of(state.stage, state.layer).first,
                   [&](std::size_t rank, const models::MeshCoordinates& at) {
                     const bool mine = state.expert
                                           ? *state.expert / experts_of_a_rank() == at.ep &&
                                                 at.etp == 0 && at.edp == 0
                                           : at.tp == 0 && at.dp == 0;
                     if (mine) ranks[rank].push_back(state.object);
                   });
    }
    return ranks;
  }

 private:
  static models::MeshShape fewest_ranks(const TransformerConfig& config, ParallelConfig parallel) {
    require(config.num_moe_experts > 0 ||
                (parallel.expert_model_parallel_size == 1 && !parallel.expert_tensor_parallel_size),
            ErrorKind::kUsage, "--ep and --etp: the model has no experts");
    require_divisible(config, parallel);
    parallel.context_parallel_size = 1;
    return {parallel, parallel.world_size()};
  }

  std::size_t size() const { return static_cast<std::size_t>(mesh_.world_size()); }
  std::int64_t experts_of_a_rank() const { return map_.config.num_moe_experts / mesh_.ep(); }

  // The stage of a module, and which of its chunks has it.
  std::pair<int, int> place_of(Stage stage, std::optional<std::int64_t> layer) const {
    const auto index = static_cast<std::size_t>(layer.value_or(0));
    switch (stage) {
      case Stage::kFirst:
        return {stages_.embedding, 0};
      case Stage::kLayer:
        return {stages_.layers[index], stages_.layer_chunks[index]};
      case Stage::kMtp:
        return {stages_.mtp[index], stages_.mtp_chunks[index]};
      case Stage::kLast:
        return {stages_.loss, stages_.num_chunks - 1};
    }
    return {};
  }

  template <typename Visit>
  void each_rank_of(int stage, const Visit& visit) const {
    const int of_stage = mesh_.world_size() / mesh_.pp();
    for (int rank = stage * of_stage; rank < (stage + 1) * of_stage; ++rank)
      visit(static_cast<std::size_t>(rank), mesh_.coordinates(rank));
  }

  const ModelMap& map_;
  models::MeshShape mesh_;
  models::PipelineStages stages_;
};

}  // namespace

std::vector<std::vector<RankTensor>> rank_tensors(const ModelMap& map,
                                                  const ParallelConfig& parallel) {
  return Ranks(map, parallel).tensors();
}

ShardedTensor sharded_tensor(const ModelMap& map,
                             const RankTensor& local,
                             const Box& box,
                             distckpt::DType dtype) {
  const auto& tensor = map.megatron[local.megatron];
  ShardedTensor shard{.key = map.written_key(tensor),
                      .dtype = dtype,
                      .local_shape = box.size,
                      .global_shape = local.shape,
                      .global_offset = box.offset,
                      .replica_id = local.replica_id};
  const auto prepend = [&](std::int64_t size, std::int64_t index) {
    shard.global_shape.push_front(size);
    shard.global_offset.push_front(index);
    ++shard.prepend_axis_num;
  };
  if (tensor.expert) prepend(map.config.num_moe_experts, *tensor.expert);
  if (shard.key == tensor.stacked_key) prepend(tensor.stack_size, tensor.stack_index);
  return shard;
}

std::vector<distckpt::RankState> sharded_state(const ModelMap& map,
                                               const std::vector<distckpt::DType>& dtypes,
                                               const ParallelConfig& parallel) {
  const Ranks ranks(map, parallel);
  const auto tensors = ranks.tensors();
  auto extra_states = ranks.extra_states();
  std::vector<distckpt::RankState> states(tensors.size());
  for (std::size_t rank = 0; rank < tensors.size(); ++rank) {
    for (const auto& tensor : tensors[rank]) {
      for (const auto& box : tensor.boxes) {
        states[rank].tensors.push_back(sharded_tensor(map, tensor, box, dtypes[tensor.megatron]));
      }
    }
    states[rank].extra_states = std::move(extra_states[rank]);
  }
  return states;
}

std::vector<distckpt::RankState> sharded_state(
    const ModelMap& map,
    const std::vector<distckpt::DType>& dtypes,
    const std::vector<std::vector<ShardedTensor>>& ranks) {
  std::unordered_map<std::string, std::uint32_t> index;
  for (std::uint32_t i = 0; i < map.megatron.size(); ++i)
    index.emplace(single_key(map.megatron[i]), i);
  std::vector<distckpt::RankState> states(ranks.size());
  std::vector<std::size_t> writers;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const auto& tensor : ranks[rank]) {
      const auto known = index.find(tensor.key);
      if (known == index.end() || !tensor.is_main_replica()) continue;
      const RankTensor local{
          .megatron = known->second, .shape = tensor.global_shape, .replica_id = tensor.replica_id};
      states[rank].tensors.push_back(
          sharded_tensor(map, local, tensor.box(), dtypes[known->second]));
    }
    if (!states[rank].tensors.empty()) writers.push_back(rank);
  }
  for (std::size_t i = 0; i < map.extra_states.size() && !writers.empty(); ++i) {
    states[writers[i % writers.size()]].extra_states.push_back(map.extra_states[i].object);
  }
  return states;
}

}  // namespace ferry::converter
