#include "converter/sharded_state.h"

#include <utility>

#include "distckpt/error.h"
#include "distckpt/pipeline_stages.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::ParallelConfig;
using distckpt::Shape;
using distckpt::ShardedTensor;

// Where a rank stands among the ranks of its stage: dense layers are split over tensor parallel
// groups, experts over expert tensor parallel and expert parallel groups of the same ranks.
struct StageRank {
  int tp = 0;
  int dp = 0;  // replica of the dense tensors
  int etp = 0;
  int ep = 0;
  int edp = 0;  // replica of the experts
};

class RankBuilder {
 public:
  RankBuilder(const ModelMap& map, const ParallelConfig& parallel, int rank_of_stage)
      : map_(map),
        parallel_(parallel),
        experts_per_rank_(map.config.num_moe_experts / parallel.expert_model_parallel_size) {
    const auto divide = [&](int& index, int size) {
      const int rest = index % size;
      index /= size;
      return rest;
    };
    int rest = rank_of_stage;
    at_.tp = divide(rest, parallel.tensor_model_parallel_size);
    at_.dp = rest;
    rest = rank_of_stage;
    at_.etp = divide(rest, parallel.expert_tensor_parallel());
    at_.ep = divide(rest, parallel.expert_model_parallel_size);
    at_.edp = rest;
  }

  void add_tensor(const MegatronTensor& tensor, distckpt::DType dtype) {
    if (tensor.expert && !has_expert(*tensor.expert)) return;
    const int split =
        tensor.expert ? parallel_.expert_tensor_parallel() : parallel_.tensor_model_parallel_size;
    const int rank = tensor.expert ? at_.etp : at_.tp;
    const int replica = tensor.expert ? at_.edp : at_.dp;
    Shape shape = tensor.shape;
    if (tensor.vocabulary) shape[0] = parallel_.padded_vocab_size(shape[0]);
    if (tensor.split == Split::kNone) {
      return add_shard(tensor, dtype, shape, Box::whole(shape), {0, rank, replica});
    }
    const int dim = tensor.split == Split::kColumn ? 0 : 1;
    const int halves = tensor.merge == Merge::kGateUp ? 2 : 1;
    const bool groups = tensor.merge == Merge::kQkvGroups;
    const auto units = groups ? map_.config.num_query_groups : shape[dim] / halves;
    require(units % split == 0, ErrorKind::kUsage, "{} {}: {} {} of {} cannot be split so",
            tensor.expert ? "--etp" : "--tp", split, units,
            groups     ? "query groups"
            : dim == 0 ? "rows"
                       : "columns",
            tensor.key);
    const auto local = shape[dim] / halves / split;
    for (int half = 0; half < halves; ++half) {
      Box box = Box::whole(shape);
      box.offset[dim] = half * (shape[dim] / halves) + rank * local;
      box.size[dim] = local;
      add_shard(tensor, dtype, shape, box, {0, 0, replica});
    }
  }

  void add_extra_state(const MegatronObject& state) {
    const bool mine = state.expert ? has_expert(*state.expert) && at_.etp == 0 && at_.edp == 0
                                   : at_.tp == 0 && at_.dp == 0;
    if (mine) state_.extra_states.push_back(state.object);
  }

  distckpt::RankState take() { return std::move(state_); }

 private:
  bool has_expert(std::int64_t expert) const { return expert / experts_per_rank_ == at_.ep; }

  void add_shard(const MegatronTensor& tensor,
                 distckpt::DType dtype,
                 const Shape& shape,
                 const Box& box,
                 std::vector<int> replica_id) {
    ShardedTensor shard{.key = map_.written_key(tensor),
                        .dtype = dtype,
                        .local_shape = box.size,
                        .global_shape = shape,
                        .global_offset = box.offset,
                        .replica_id = std::move(replica_id)};
    const auto prepend = [&](std::int64_t size, std::int64_t index) {
      shard.global_shape.push_front(size);
      shard.global_offset.push_front(index);
      ++shard.prepend_axis_num;
    };
    if (tensor.expert) prepend(map_.config.num_moe_experts, *tensor.expert);
    if (shard.key == tensor.stacked_key) prepend(map_.config.num_layers, *tensor.layer);
    state_.tensors.push_back(std::move(shard));
  }

  const ModelMap& map_;
  const ParallelConfig& parallel_;
  std::int64_t experts_per_rank_;
  StageRank at_;
  distckpt::RankState state_;
};

void require_divisible(std::int64_t size, int parts, std::string_view flag, std::string_view what) {
  require(size % parts == 0, ErrorKind::kUsage, "{} {}: {} {} cannot be split so", flag, parts,
          size, what);
}

}  // namespace

std::vector<distckpt::RankState> sharded_state(const ModelMap& map,
                                               const std::vector<distckpt::DType>& dtypes,
                                               const ParallelConfig& parallel) {
  const auto& config = map.config;
  require_divisible(config.num_attention_heads, parallel.tensor_model_parallel_size, "--tp",
                    "attention heads");
  if (config.num_moe_experts > 0) {
    require_divisible(config.num_moe_experts, parallel.expert_model_parallel_size, "--ep",
                      "experts");
  } else {
    require(parallel.expert_model_parallel_size == 1 && !parallel.expert_tensor_parallel_size,
            ErrorKind::kUsage, "--ep and --etp: the model has no experts");
  }
  const auto stages = pipeline_stages(parallel, static_cast<int>(config.num_layers),
                                      static_cast<int>(config.mtp_num_layers));
  const auto stage_of = [&](Stage stage, std::optional<std::int64_t> layer) {
    switch (stage) {
      case Stage::kFirst:
        return stages.embedding;
      case Stage::kLayer:
        return stages.layers[static_cast<std::size_t>(*layer)];
      case Stage::kMtp:
        return stages.mtp[static_cast<std::size_t>(*layer)];
      case Stage::kLast:
        return stages.loss;
    }
    return 0;
  };
  const int stage_size = parallel.stage_size();
  std::vector<RankBuilder> ranks;
  for (int rank = 0; rank < parallel.pipeline_model_parallel_size * stage_size; ++rank) {
    ranks.emplace_back(map, parallel, rank % stage_size);
  }
  const auto each_rank_of = [&](int stage, auto&& visit) {
    for (int i = 0; i < stage_size; ++i)
      visit(ranks[static_cast<std::size_t>(stage * stage_size + i)]);
  };
  for (std::size_t i = 0; i < map.megatron.size(); ++i) {
    const auto& tensor = map.megatron[i];
    each_rank_of(stage_of(tensor.stage, tensor.layer),
                 [&](RankBuilder& rank) { rank.add_tensor(tensor, dtypes[i]); });
  }
  for (const auto& state : map.extra_states) {
    each_rank_of(stage_of(state.stage, state.layer),
                 [&](RankBuilder& rank) { rank.add_extra_state(state); });
  }
  std::vector<distckpt::RankState> states;
  for (auto& rank : ranks) states.push_back(rank.take());
  return states;
}

}  // namespace ferry::converter
