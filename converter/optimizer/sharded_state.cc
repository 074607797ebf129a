#include "converter/optimizer/sharded_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "converter/families/megatron_links.h"
#include "distckpt/base/error.h"
#include "models/spec/pipeline_stages.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::ShardedTensor;
using models::ParallelConfig;

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

  void add_tensor(std::uint32_t index, int chunk) {
    const auto& tensor = map_.megatron[index];
    if (tensor.expert && !has_expert(*tensor.expert)) return;
    const int split =
        tensor.expert ? parallel_.expert_tensor_parallel() : parallel_.tensor_model_parallel_size;
    const int rank = tensor.expert ? at_.etp : at_.tp;
    const int replica = tensor.expert ? at_.edp : at_.dp;
    RankTensor local{
        .megatron = index, .chunk = chunk, .shape = tensor.shape, .replica_id = {0, 0, replica}};
    auto& shape = local.shape;
    if (tensor.vocabulary) shape[0] = parallel_.padded_vocab_size(shape[0]);
    if (tensor.split == Split::kNone) {
      local.boxes.push_back(Box::whole(shape));
      local.replica_id[1] = rank;
      tensors_.push_back(std::move(local));
      return;
    }
    const int dim = tensor.split == Split::kColumn ? 0 : 1;
    const int halves = tensor.merge == Merge::kGateUp ? 2 : 1;
    const auto size = shape[dim] / halves / split;
    for (int half = 0; half < halves; ++half) {
      Box box = Box::whole(shape);
      box.offset[dim] = half * (shape[dim] / halves) + rank * size;
      box.size[dim] = size;
      local.boxes.push_back(box);
    }
    tensors_.push_back(std::move(local));
  }

  void add_extra_state(const MegatronObject& state) {
    const bool mine = state.expert ? has_expert(*state.expert) && at_.etp == 0 && at_.edp == 0
                                   : at_.tp == 0 && at_.dp == 0;
    if (mine) extra_states_.push_back(state.object);
  }

  std::vector<RankTensor> take_tensors() { return std::move(tensors_); }
  std::vector<distckpt::ShardedObject> take_extra_states() { return std::move(extra_states_); }

 private:
  bool has_expert(std::int64_t expert) const { return expert / experts_per_rank_ == at_.ep; }

  const ModelMap& map_;
  const ParallelConfig& parallel_;
  std::int64_t experts_per_rank_;
  StageRank at_;
  std::vector<RankTensor> tensors_;
  std::vector<distckpt::ShardedObject> extra_states_;
};

// The size of a mesh that does not divide what it has to, and what that is: "4 attention heads".
struct Indivisible {
  int ParallelConfig::*size = nullptr;
  std::string_view flag{};
  std::string what{};
};

// The first one, if there is any.
std::optional<Indivisible> find_indivisible(const ModelMap& map, const ParallelConfig& parallel) {
  const auto& config = map.config;
  const int tp = parallel.tensor_model_parallel_size;
  const auto of_tp = [](std::string what) {
    return Indivisible{&ParallelConfig::tensor_model_parallel_size, "--tp", std::move(what)};
  };
  if (config.num_attention_heads % tp != 0)
    return of_tp(fmt::format("{} attention heads", config.num_attention_heads));
  if (config.num_moe_experts % parallel.expert_model_parallel_size != 0) {
    return Indivisible{&ParallelConfig::expert_model_parallel_size, "--ep",
                       fmt::format("{} experts", config.num_moe_experts)};
  }
  for (const auto& tensor : map.megatron) {
    if (tensor.split == Split::kNone) continue;
    const int split = tensor.expert ? parallel.expert_tensor_parallel() : tp;
    if (tensor.merge == Merge::kQkvGroups && !config.shares_query_groups(split))
      return of_tp(fmt::format("{} query groups of {}", config.num_query_groups, tensor.key));
    const int dim = tensor.split == Split::kColumn ? 0 : 1;
    const auto size =
        tensor.vocabulary ? parallel.padded_vocab_size(tensor.shape[0]) : tensor.shape[dim];
    const auto units = size / (tensor.merge == Merge::kGateUp ? 2 : 1);
    if (units % split == 0) continue;
    auto found =
        of_tp(fmt::format("{} {} of {}", units, dim == 0 ? "rows" : "columns", tensor.key));
    // Without a size of their own the experts are split as the rest is.
    if (tensor.expert && parallel.expert_tensor_parallel_size)
      found = {nullptr, "--etp", found.what};
    return found;
  }
  return std::nullopt;
}

// Throws Error(kUsage) that says what cannot be split, and over how many ranks it can.
void require_divisible(const ModelMap& map, const ParallelConfig& parallel) {
  const auto found = find_indivisible(map, parallel);
  if (!found) return;
  const auto with = [&](int size) {
    auto changed = parallel;
    if (found->size != nullptr) {
      changed.*(found->size) = size;
    } else {
      changed.expert_tensor_parallel_size = size;
    }
    return changed;
  };
  std::vector<int> possible;
  const auto& config = map.config;
  const auto most =
      std::max({config.num_attention_heads, config.num_moe_experts, config.moe_ffn_hidden_size});
  for (int size = 1; size <= most && possible.size() < 16; ++size) {
    const auto other = find_indivisible(map, with(size));
    if (!other || other->flag != found->flag) possible.push_back(size);
  }
  const auto asked =
      found->size != nullptr ? parallel.*(found->size) : *parallel.expert_tensor_parallel_size;
  throw Error(ErrorKind::kUsage,
              fmt::format("{} {}: {} cannot be split so", found->flag, asked, found->what),
              possible.empty()
                  ? ""
                  : fmt::format("possible: {} {}", found->flag, fmt::join(possible, ", ")));
}

// Where a module stands in the pipeline.
struct Position {
  int stage = 0;
  int chunk = 0;
};

class Pipeline {
 public:
  Pipeline(const ModelMap& map, const ParallelConfig& parallel)
      : stages_(pipeline_stages(parallel,
                                static_cast<int>(map.config.num_layers),
                                static_cast<int>(map.config.mtp_num_layers))) {}

  Position of(Stage stage, std::optional<std::int64_t> layer) const {
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

 private:
  models::PipelineStages stages_;
};

// One builder for each rank, with what is at each position added to the ranks of that stage.
std::vector<RankBuilder> build_ranks(const ModelMap& map, const ParallelConfig& parallel) {
  require(map.config.num_moe_experts > 0 ||
              (parallel.expert_model_parallel_size == 1 && !parallel.expert_tensor_parallel_size),
          ErrorKind::kUsage, "--ep and --etp: the model has no experts");
  require_divisible(map, parallel);
  const Pipeline pipeline(map, parallel);
  const int stage_size = parallel.stage_size();
  std::vector<RankBuilder> ranks;
  for (int rank = 0; rank < parallel.pipeline_model_parallel_size * stage_size; ++rank) {
    ranks.emplace_back(map, parallel, rank % stage_size);
  }
  const auto each_rank_of = [&](int stage, auto&& visit) {
    for (int i = 0; i < stage_size; ++i)
      visit(ranks[static_cast<std::size_t>(stage * stage_size + i)]);
  };
  for (std::uint32_t i = 0; i < map.megatron.size(); ++i) {
    const auto at = pipeline.of(map.megatron[i].stage, map.megatron[i].layer);
    each_rank_of(at.stage, [&](RankBuilder& rank) { rank.add_tensor(i, at.chunk); });
  }
  for (const auto& state : map.extra_states) {
    each_rank_of(pipeline.of(state.stage, state.layer).stage,
                 [&](RankBuilder& rank) { rank.add_extra_state(state); });
  }
  return ranks;
}

}  // namespace

std::vector<std::vector<RankTensor>> rank_tensors(const ModelMap& map,
                                                  const ParallelConfig& parallel) {
  std::vector<std::vector<RankTensor>> ranks;
  for (auto& rank : build_ranks(map, parallel)) ranks.push_back(rank.take_tensors());
  return ranks;
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
  if (shard.key == tensor.stacked_key) prepend(map.config.num_layers, *tensor.layer);
  return shard;
}

std::vector<distckpt::RankState> sharded_state(const ModelMap& map,
                                               const std::vector<distckpt::DType>& dtypes,
                                               const ParallelConfig& parallel) {
  std::vector<distckpt::RankState> states;
  for (auto& rank : build_ranks(map, parallel)) {
    distckpt::RankState state;
    for (const auto& tensor : rank.take_tensors()) {
      for (const auto& box : tensor.boxes)
        state.tensors.push_back(sharded_tensor(map, tensor, box, dtypes[tensor.megatron]));
    }
    state.extra_states = rank.take_extra_states();
    states.push_back(std::move(state));
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
