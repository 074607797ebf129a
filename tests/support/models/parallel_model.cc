#include "tests/support/models/parallel_model.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <utility>

#include "converter/families/megatron_links.h"
#include "converter/optimizer/optimizer_tensors.h"
#include "converter/optimizer/sharded_state.h"
#include "models/spec/pipeline_stages.h"
#include "tests/support/expect.h"
#include "tests/support/fake_ranks.h"
#include "tests/support/files.h"
#include "tests/support/models/random_model.h"
#include "tests/support/naive_cast.h"
#include "tests/support/random_boxes.h"

namespace ferry::support {

using converter::optimizer_map;
using converter::RankTensor;
using distckpt::Box;
using distckpt::DType;
using distckpt::LocalShard;
using distckpt::ShardedTensor;

namespace {

constexpr std::string_view kEmbedding = "embedding.word_embeddings.weight";

Box split_by_rows(const Box& columns, const distckpt::Shape& shape) {
  const auto parts = shape[1] / columns.size[1];
  if (shape[0] % parts != 0) return columns;
  Box rows = Box::whole(shape);
  rows.size[0] = shape[0] / parts;
  rows.offset[0] = columns.offset[1] / columns.size[1] * rows.size[0];
  return rows;
}

}  // namespace

ParallelModel::ParallelModel(const converter::ModelMap& map,
                             const std::vector<distckpt::ModelTensor>& tensors,
                             const MeshOptions& options)
    : map_(map), tensors_(tensors) {
  const auto& parallel = options.parallel;
  const auto ranks = rank_tensors(map, parallel);
  const auto stages = pipeline_stages(parallel, static_cast<int>(map.config.num_layers),
                                      static_cast<int>(map.config.mtp_num_layers));
  std::set<int> with_embedding(stages.mtp.begin(), stages.mtp.end());
  const bool tied = map.config.head == models::Head::kLanguageModel &&
                    !map.config.untie_embeddings_and_output_weights;
  if (tied && !options.stored_head) with_embedding.insert(stages.loss);
  with_embedding.erase(stages.embedding);
  const auto per_stage = parallel.stage_size();
  shards_.resize(ranks.size() * static_cast<std::size_t>(options.dp));
  for (int rank = 0; rank < size(); ++rank) {
    const int stage = rank / (per_stage * options.dp);
    const int place = rank % (per_stage * options.dp);
    auto held = ranks[static_cast<std::size_t>(stage * per_stage + place % per_stage)];
    for (auto& tensor : ranks[static_cast<std::size_t>(place % per_stage)]) {
      if (map.megatron[tensor.megatron].key != kEmbedding || !with_embedding.contains(stage))
        continue;
      held.push_back(tensor);
      held.back().replica_id[0] = stage;
    }
    const auto at = static_cast<std::size_t>(rank);
    add_rank(at, held, options, place / per_stage);
    if (!tied || !options.stored_head || stage != stages.loss) continue;
    for (const auto& shard : std::vector(sharded_state_dict(place % per_stage))) {
      if (shard.tensor.key != kEmbedding) continue;
      auto head = shard.tensor;
      head.key = "output_layer.weight";
      if (place >= per_stage) head.replica_id[2] += place;
      add_shard(at, head, options.transposed);
    }
  }
  auto of_state = options;
  of_state.optimizer.clear();
  of_state.dtype = DType::kF32;
  for (const auto& kind : options.optimizer) {
    const auto state = optimizer_map(map, kind);
    const ParallelModel held(state, state.tensors, of_state);
    for (std::size_t rank = 0; rank < shards_.size(); ++rank)
      shards_[rank].insert(shards_[rank].end(), held.shards_[rank].begin(),
                           held.shards_[rank].end());
  }
}

void ParallelModel::add_rank(std::size_t rank,
                             const std::vector<RankTensor>& tensors,
                             const MeshOptions& options,
                             int copy) {
  for (const auto& local : tensors) {
    const auto& megatron = map_.megatron[local.megatron];
    auto dtype = options.dtype.value_or(tensors_[megatron.parts.front().model].dtype);
    if (megatron.fp32) dtype = DType::kF32;
    for (auto box : local.boxes) {
      if (options.by_rows && megatron.split == converter::Split::kRow)
        box = split_by_rows(box, local.shape);
      ShardedTensor tensor{.key = single_key(megatron),
                           .dtype = dtype,
                           .local_shape = box.size,
                           .global_shape = local.shape,
                           .global_offset = box.offset,
                           .replica_id = local.replica_id};
      tensor.replica_id[2] += copy * options.parallel.stage_size();
      add_shard(rank, std::move(tensor), options.transposed);
    }
  }
}

void ParallelModel::add_shard(std::size_t rank, ShardedTensor tensor, bool transposed) {
  const auto bytes = tensor.local_shape.product() * size_of(tensor.dtype);
  const auto memory = std::make_shared<std::vector<std::byte>>(bytes, kUntouched);
  LocalShard shard{.tensor = std::move(tensor), .data = memory->data(), .owner = memory};
  if (transposed && shard.tensor.local_shape.rank() == 2)
    shard.strides = {1, shard.tensor.local_shape[0]};
  shards_[rank].push_back(std::move(shard));
}

distckpt::MeshLayout ParallelModel::mesh(int rank) const {
  std::vector<std::vector<ShardedTensor>> ranks;
  for (const auto& shards : shards_) {
    ranks.emplace_back();
    for (const auto& shard : shards) ranks.back().push_back(shard.tensor);
  }
  return distckpt::make_mesh_layout(std::move(ranks), rank, sharded_state_dict(rank));
}

void ParallelModel::run(const std::function<void(const distckpt::RankGroup&,
                                                 const distckpt::MeshLayout&)>& body) const {
  run_as_ranks(size(), [&](const distckpt::RankGroup& group) {
    body(group, distckpt::gather_mesh_layout(group, sharded_state_dict(group.rank)));
  });
}

std::vector<std::byte> packed_bytes(const LocalShard& shard) {
  const auto& shape = shard.tensor.local_shape;
  const auto size = size_of(shard.tensor.dtype);
  const auto strides = shard.strides.empty() ? row_major_strides(shape) : shard.strides;
  std::vector<std::byte> packed(static_cast<std::size_t>(shape.product() * size));
  for (std::int64_t i = 0; i < shape.product(); ++i) {
    const auto at = element_of(Box::whole(shape), i);
    std::int64_t offset = 0;
    for (int d = 0; d < at.rank(); ++d) offset += at[d] * strides[d];
    std::memcpy(packed.data() + i * size, shard.data + offset * size,
                static_cast<std::size_t>(size));
  }
  return packed;
}

NaiveWeights::NaiveWeights(const std::filesystem::path& folder,
                           const models::TransformerConfig& config)
    : config_(config) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const auto file = read_bytes(entry.path());
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), sizeof(length));
    const auto* const text = reinterpret_cast<const char*>(file.data()) + 8;
    const auto header = nlohmann::json::parse(text, text + length);
    for (const auto& [name, value] : header.items()) {
      if (name == "__metadata__") continue;
      const auto* const data = file.data() + 8 + length;
      weights_[name] = {
          .dtype = *distckpt::dtype_from_safetensors(value["dtype"].get<std::string>()),
          .bytes = {data + value["data_offsets"][0].get<std::int64_t>(),
                    data + value["data_offsets"][1].get<std::int64_t>()}};
    }
  }
}

NaiveWeights::Weight NaiveWeights::rows_of(const std::vector<std::string>& names) const {
  Weight all{.dtype = weights_.at(names.front()).dtype};
  for (const auto& name : names) {
    const auto& one = weights_.at(name).bytes;
    all.bytes.insert(all.bytes.end(), one.begin(), one.end());
  }
  return all;
}

// The query heads of a group, its key and its value, group after group.
NaiveWeights::Weight NaiveWeights::interleaved(const std::string& prefix,
                                               const std::string& what) const {
  Weight all{.dtype = weights_.at(prefix + "q_proj." + what).dtype};
  const auto groups = static_cast<std::size_t>(config_.num_query_groups);
  for (std::size_t g = 0; g < groups; ++g) {
    for (const char* name : {"q", "k", "v"}) {
      const auto& one = weights_.at(fmt::format("{}{}_proj.{}", prefix, name, what)).bytes;
      const auto size = one.size() / groups;
      all.bytes.insert(all.bytes.end(), &one[g * size], &one[g * size] + size);
    }
  }
  return all;
}

NaiveWeights::Weight NaiveWeights::whole(const std::string& key) const {
  static const std::map<std::string, std::vector<std::string>> kOutside{
      {"embedding.word_embeddings.weight", {"model.embed_tokens.weight"}},
      {"decoder.final_layernorm.weight", {"model.norm.weight"}},
      {"output_layer.bias", {"score.bias"}},
  };
  // In a layer: what lies above each other, as this family or another one names it.
  static const std::map<std::string, std::vector<std::vector<std::string>>> kInside{
      {"input_layernorm.weight", {{"input_layernorm.weight"}}},
      {"self_attention.linear_qkv.layer_norm_weight", {{"input_layernorm.weight"}}},
      {"self_attention.linear_proj.weight", {{"self_attn.o_proj.weight"}}},
      {"self_attention.linear_proj.bias", {{"self_attn.o_proj.bias"}}},
      {"self_attention.q_layernorm.weight", {{"self_attn.q_norm.weight"}}},
      {"self_attention.k_layernorm.weight", {{"self_attn.k_norm.weight"}}},
      {"self_attention.linear_q_proj.weight", {{"self_attn.q_proj.weight"}}},
      {"self_attention.linear_q_down_proj.weight", {{"self_attn.q_a_proj.weight"}}},
      {"self_attention.linear_q_up_proj.layer_norm_weight", {{"self_attn.q_a_layernorm.weight"}}},
      {"self_attention.linear_q_up_proj.weight", {{"self_attn.q_b_proj.weight"}}},
      {"self_attention.linear_kv_down_proj.weight", {{"self_attn.kv_a_proj_with_mqa.weight"}}},
      {"self_attention.linear_kv_up_proj.layer_norm_weight", {{"self_attn.kv_a_layernorm.weight"}}},
      {"self_attention.linear_kv_up_proj.weight", {{"self_attn.kv_b_proj.weight"}}},
      {"mlp.linear_fc1.layer_norm_weight", {{"post_attention_layernorm.weight"}}},
      {"pre_mlp_layernorm.weight", {{"post_attention_layernorm.weight"}}},
      {"mlp.linear_fc1.weight", {{"mlp.gate_proj.weight", "mlp.up_proj.weight"}}},
      {"mlp.linear_fc1.bias", {{"mlp.gate_proj.bias", "mlp.up_proj.bias"}}},
      {"mlp.linear_fc2.weight", {{"mlp.down_proj.weight"}}},
      {"mlp.linear_fc2.bias", {{"mlp.down_proj.bias"}}},
      {"mlp.router.weight", {{"mlp.gate.weight"}, {"block_sparse_moe.gate.weight"}}},
      {"mlp.router.expert_bias", {{"mlp.gate.e_score_correction_bias"}}},
      {"mlp.shared_experts.linear_fc1.weight",
       {{"mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"},
        {"mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"}}},
      {"mlp.shared_experts.linear_fc2.weight",
       {{"mlp.shared_experts.down_proj.weight"}, {"mlp.shared_expert.down_proj.weight"}}},
      {"mlp.shared_experts.gate_weight", {{"mlp.shared_expert_gate.weight"}}},
      {"enorm.weight", {{"enorm.weight"}}},
      {"hnorm.weight", {{"hnorm.weight"}}},
      {"eh_proj.weight", {{"eh_proj.weight"}}},
      {"final_layernorm.weight", {{"shared_head.norm.weight"}}},
  };
  if (const auto outside = kOutside.find(key); outside != kOutside.end())
    return rows_of(outside->second);
  if (key == "output_layer.weight") {
    for (const char* name : {"lm_head.weight", "score.weight"}) {
      if (weights_.contains(name)) return rows_of({name});
    }
    return rows_of({"model.embed_tokens.weight"});  // tied
  }
  auto rest = key;
  const auto take_number = [&](std::string_view prefix) -> std::optional<int> {
    if (!rest.starts_with(prefix)) return std::nullopt;
    rest.erase(0, prefix.size());
    const int number = std::stoi(rest);
    rest.erase(0, rest.find('.') + 1);
    return number;
  };
  auto layer = take_number("decoder.layers.");
  if (!layer) {
    layer = static_cast<int>(config_.num_layers) + take_number("mtp.layers.").value();
    if (rest.starts_with("transformer_layer.")) rest.erase(0, rest.find('.') + 1);
  }
  const auto prefix = fmt::format("model.layers.{}.", *layer);
  if (rest == "self_attention.linear_qkv.weight")
    return interleaved(prefix + "self_attn.", "weight");
  if (rest == "self_attention.linear_qkv.bias") return interleaved(prefix + "self_attn.", "bias");
  if (const auto expert = take_number("mlp.experts.experts.")) {
    const auto mixtral = fmt::format("{}block_sparse_moe.experts.{}.", prefix, *expert);
    const auto other = fmt::format("{}mlp.experts.{}.", prefix, *expert);
    const bool is_mixtral = weights_.contains(mixtral + "w1.weight");
    if (rest == "linear_fc1.weight") {
      return is_mixtral ? rows_of({mixtral + "w1.weight", mixtral + "w3.weight"})
                        : rows_of({other + "gate_proj.weight", other + "up_proj.weight"});
    }
    return rows_of({is_mixtral ? mixtral + "w2.weight" : other + "down_proj.weight"});
  }
  for (auto names : kInside.at(rest)) {
    for (auto& name : names) name.insert(0, prefix);
    if (weights_.contains(names.front())) return rows_of(names);
  }
  throw std::out_of_range(key);
}

std::vector<std::byte> NaiveWeights::expected(const ShardedTensor& tensor) const {
  const auto full = whole(tensor.key);
  const auto from_size = size_of(full.dtype);
  const auto size = size_of(tensor.dtype);
  const auto elements = std::ssize(full.bytes) / from_size;
  const auto box = tensor.box();
  std::vector<std::byte> bytes(static_cast<std::size_t>(box.volume() * size));
  for (std::int64_t i = 0; i < box.volume(); ++i) {
    const auto index = index_of(tensor.global_shape, element_of(box, i));
    if (index >= elements) continue;  // padding: zero
    const auto* const from = full.bytes.data() + index * from_size;
    auto* const into = bytes.data() + i * size;
    if (full.dtype == tensor.dtype) {
      std::memcpy(into, from, static_cast<std::size_t>(size));
    } else {
      naive_round(naive_value(full.dtype, from), tensor.dtype, into);
    }
  }
  return bytes;
}

std::vector<MeshOptions> meshes_for(const models::TransformerConfig& config) {
  std::vector<MeshOptions> meshes{
      {.parallel = {}, .dtype = {}},
      {.parallel = {.tensor_model_parallel_size = 2}, .dp = 2, .transposed = true, .dtype = {}},
      {.parallel = {.tensor_model_parallel_size = 2}, .by_rows = true, .dtype = {}},
      {.parallel = {.tensor_model_parallel_size = 4}, .dtype = {}},
      {.parallel = {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2},
       .dtype = {}},
      {.parallel = {.pipeline_model_parallel_size = 2},
       .stored_head = true,
       .dtype = distckpt::DType::kF32},
  };
  if (config.num_layers % 4 == 0) {
    meshes.push_back(
        {.parallel = {.pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 2},
         .dtype = {}});
  }
  for (auto& mesh : meshes) {
    if (mesh.parallel.pipeline_model_parallel_size == 2 && config.num_layers % 2 == 1)
      mesh.parallel.num_layers_in_first_pipeline_stage = 1;
  }
  if (config.num_moe_experts == 0) return meshes;
  meshes.push_back({.parallel = {.expert_model_parallel_size = 2}, .dtype = {}});
  meshes.push_back({.parallel = {.tensor_model_parallel_size = 2,
                                 .expert_model_parallel_size = 4,
                                 .expert_tensor_parallel_size = 1},
                    .dtype = {}});
  meshes.push_back({.parallel = {.tensor_model_parallel_size = 1,
                                 .expert_model_parallel_size = 2,
                                 .expert_tensor_parallel_size = 2},
                    .by_rows = true,
                    .dtype = {}});
  return meshes;
}

converter::LoadReport load_rank(const converter::Checkpoint& checkpoint,
                                const ParallelModel& model,
                                int rank,
                                const converter::LoadOptions& options) {
  const auto mesh = model.mesh(rank);
  distckpt::MemorySink memory(mesh.layout);
  return converter::load(checkpoint, mesh, memory, options);
}

void expect_holds(const std::vector<LocalShard>& shards, const NaiveWeights& weights) {
  for (const auto& shard : shards) {
    ASSERT_TRUE(same_bytes(weights.expected(shard.tensor), packed_bytes(shard)))
        << shard.tensor.key << " " << to_string(shard.tensor.box());
  }
}

void expect_loads(const converter::Checkpoint& checkpoint,
                  const NaiveWeights& weights,
                  const MeshOptions& options) {
  const ParallelModel model(checkpoint.map, checkpoint.tensors, options);
  for (int rank = 0; rank < model.size(); ++rank) {
    SCOPED_TRACE(fmt::format("rank {} of {}", rank, model.size()));
    const auto report = load_rank(checkpoint, model, rank, {.threads = rank % 3 + 1});
    const auto& shards = model.sharded_state_dict(rank);
    ASSERT_NO_FATAL_FAILURE(expect_holds(shards, weights));
    std::int64_t bytes = 0;
    for (const auto& shard : shards)
      bytes += shard.tensor.local_shape.product() * size_of(shard.tensor.dtype);
    EXPECT_LE(report.bytes, bytes);  // padding is filled, not loaded
    EXPECT_TRUE(report.nonzero_padding.empty());
  }
}

}  // namespace ferry::support
