#include "converter/optimizer/optimizer_buckets.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"

namespace ferry::converter {
namespace {

constexpr std::int64_t kAlignment = 64;  // elements; param_and_grad_buffer.py, pad_param_start

// GPTModel registers its embedding, the decoder's layers, their final norm, prediction layers, the
// output layer.
enum class BucketPart : std::uint8_t { kEmbedding, kLayer, kFinalNorm, kPrediction, kOutput };

BucketPart part_of(const MegatronTensor& tensor) {
  switch (tensor.stage) {
    case Stage::kFirst:
      return BucketPart::kEmbedding;
    case Stage::kLayer:
      return BucketPart::kLayer;
    case Stage::kMtp:
      return BucketPart::kPrediction;
    case Stage::kLast:
      return tensor.key.starts_with("output_layer.") ? BucketPart::kOutput : BucketPart::kFinalNorm;
  }
  return BucketPart::kOutput;
}

// The parameter of a module that a tensor is, or is a named part of: "....in_proj.weight.query".
std::string_view module_parameter(std::string_view key) {
  constexpr std::string_view kWeight = ".weight";
  const auto part = key.rfind(".weight.");
  return part == std::string_view::npos ? key : key.substr(0, part + kWeight.size());
}

std::int64_t num_elements(const RankTensor& tensor) {
  std::int64_t total = 0;
  for (const auto& box : tensor.boxes) total += box.volume();
  return total;
}

}  // namespace

struct OptimizerBuckets::Registered {
  BucketPart part = BucketPart::kLayer;
  RankTensor tensor{};
  bool copy = false;
};

OptimizerBuckets::OptimizerBuckets(const ModelMap& map, const models::ParallelConfig& parallel)
    : map_(map), parallel_(parallel), ranks_(rank_tensors(map, parallel)) {
  for (const auto& rank : ranks_) {
    for (const auto& tensor : rank) num_chunks_ = std::max(num_chunks_, tensor.chunk + 1);
  }
}

int OptimizerBuckets::group_size(ParameterGroup group) const {
  return group == ParameterGroup::kExpert
             ? parallel_.expert_tensor_parallel() * parallel_.expert_model_parallel_size
             : parallel_.tensor_model_parallel_size;
}

int OptimizerBuckets::num_ranks(ParameterGroup group) const {
  return group_size(group) * parallel_.pipeline_model_parallel_size;
}

// The parameters of one rank and model chunk, as registered.
std::vector<OptimizerBuckets::Registered> OptimizerBuckets::registered(ParameterGroup group,
                                                                       ExpertOrder order,
                                                                       int rank,
                                                                       int chunk) const {
  const bool expert = group == ParameterGroup::kExpert;
  const int stage = rank / group_size(group);
  const auto at = [&](int of_stage) -> const std::vector<RankTensor>& {
    return ranks_.at(
        static_cast<std::size_t>(of_stage * parallel_.stage_size() + rank % group_size(group)));
  };
  std::vector<Registered> found;
  const RankTensor* embedding = nullptr;
  bool has_loss = false;
  bool has_prediction = false;
  for (const auto& tensor : at(stage)) {
    const auto& megatron = map_.megatron[tensor.megatron];
    if (tensor.chunk != chunk || megatron.fp32 || megatron.expert.has_value() != expert) continue;
    const auto part = part_of(megatron);
    has_loss = has_loss || part == BucketPart::kFinalNorm;
    has_prediction = has_prediction || part == BucketPart::kPrediction;
    if (part == BucketPart::kEmbedding) embedding = &tensor;
    found.push_back({part, tensor, tensor.replica_id != std::vector<int>{0, 0, 0}});
  }
  // Other stages have copies of the embedding: for a tied output layer, for prediction layers.
  if (!expert && embedding == nullptr && ((map_.config.is_tied() && has_loss) || has_prediction)) {
    for (const auto& tensor : at(0)) {
      if (part_of(map_.megatron[tensor.megatron]) != BucketPart::kEmbedding) continue;
      found.push_back(
          {has_prediction ? BucketPart::kEmbedding : BucketPart::kOutput, tensor, true});
    }
  }
  const auto key = [&](const Registered& one) {
    const auto& megatron = map_.megatron[one.tensor.megatron];
    const std::int64_t place = megatron.row->registered;
    const auto local_expert = megatron.expert.value_or(0);
    const bool grouped = order == ExpertOrder::kGrouped;
    return std::tuple(one.part, megatron.layer.value_or(0),
                      expert && !grouped ? local_expert : place,
                      expert && !grouped ? place : local_expert);
  };
  std::ranges::sort(found, [&](const auto& a, const auto& b) { return key(a) < key(b); });
  return found;
}

bool OptimizerBuckets::has_parameters(ParameterGroup group, int rank, int chunk) const {
  return !registered(group, ExpertOrder::kGrouped, rank, chunk).empty();
}

std::vector<BucketParameter> OptimizerBuckets::place(
    ParameterGroup group,
    ExpertOrder order,
    int rank,
    int chunk,
    const std::vector<std::int64_t>& buckets) const {
  std::vector<BucketParameter> placed;
  std::size_t bucket = 0;
  std::int64_t bucket_begin = 0;  // in the buckets, one after the other
  std::int64_t used = 0;          // of the bucket
  const auto aligned = [](std::int64_t at) { return distckpt::round_up(at, kAlignment); };
  const auto is_full = [&] { return used == buckets[bucket] || aligned(used) == buckets[bucket]; };
  const auto next_bucket = [&] {
    bucket_begin += buckets[bucket];
    ++bucket;
    used = 0;
  };
  auto parameters = registered(group, order, rank, chunk);
  const auto key_of = [&](const Registered& one) {
    const auto& megatron = map_.megatron[one.tensor.megatron];
    return std::pair(module_parameter(megatron.key), megatron.expert);
  };
  for (auto last = parameters.size(); last > 0;) {
    auto first = last - 1;  // parts of one parameter lie one behind the other
    while (first > 0 && key_of(parameters[first - 1]) == key_of(parameters[last - 1])) --first;
    const std::span parts(parameters.begin() + static_cast<std::ptrdiff_t>(first), last - first);
    last = first;
    const auto& parameter = parts.front();
    std::int64_t size = 0;
    for (const auto& part : parts) size += num_elements(part.tensor);
    const auto misfit = [&] {
      return fmt::format(
          "{} of {} elements does not fit where it should lie in bucket {} of {} elements",
          map_.describe(map_.megatron[parameter.tensor.megatron]), size, bucket,
          bucket < buckets.size() ? buckets[bucket] : 0);
    };
    require(bucket < buckets.size(), ErrorKind::kLayout, "{}", misfit());
    if (aligned(used) + size > buckets[bucket]) {
      require(used > 0 && is_full(), ErrorKind::kLayout, "{}", misfit());
      next_bucket();
      require(bucket < buckets.size() && size <= buckets[bucket], ErrorKind::kLayout, "{}",
              misfit());
    }
    used = used == 0 ? 0 : aligned(used);
    for (auto& part : parts) {
      const auto elements = num_elements(part.tensor);
      placed.push_back({.tensor = std::move(part.tensor),
                        .copy = part.copy,
                        .begin = bucket_begin + used,
                        .size = elements});
      used += elements;
    }
    if (used == buckets[bucket]) next_bucket();
  }
  if (used > 0 && is_full()) next_bucket();
  require(bucket == buckets.size(), ErrorKind::kLayout,
          "the parameters fill {} of {} buckets, and {} elements of the next", bucket,
          buckets.size(), used);
  return placed;
}

}  // namespace ferry::converter
