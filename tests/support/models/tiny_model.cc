#include "tests/support/models/tiny_model.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <utility>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"

namespace ferry::support {
namespace fs = std::filesystem;
namespace {

using distckpt::DType;
using distckpt::Shape;

struct Tensor {
  std::string name;
  DType dtype = DType::kBF16;
  Shape shape{};
};

// The tensors of one model, collected layer by layer.
class Lister {
 public:
  explicit Lister(const TinyModel& model)
      : model_(model), heads_(model.num_query_groups * model.heads_per_group) {}

  std::vector<Tensor> list() {
    weight("model.embed_tokens.weight", {model_.vocab, model_.hidden});
    norm("model.norm.weight", model_.hidden);
    if (!model_.head.empty()) {
      weight("score.weight", {model_.labels, model_.hidden});
      if (model_.head == "Token") weight("score.bias", {model_.labels});
    } else if (!model_.tied || model_.repeat_tied_head) {
      weight("lm_head.weight", {model_.vocab, model_.hidden});
    }
    for (int l = 0; l < model_.num_layers; ++l) {
      layer(fmt::format("model.layers.{}.", l), model_.has_experts() && l >= model_.dense_layers);
    }
    for (int j = 0; j < model_.prediction_layers; ++j) {
      const auto prefix = fmt::format("model.layers.{}.", model_.num_layers + j);
      layer(prefix, true);
      norm(prefix + "enorm.weight", model_.hidden);
      norm(prefix + "hnorm.weight", model_.hidden);
      norm(prefix + "shared_head.norm.weight", model_.hidden);
      weight(prefix + "eh_proj.weight", {model_.hidden, 2 * model_.hidden});
      weight(prefix + "embed_tokens.weight", {model_.vocab, model_.hidden});
      weight(prefix + "shared_head.head.weight", {model_.vocab, model_.hidden});
    }
    return std::move(tensors_);
  }

 private:
  void weight(std::string name, Shape shape) {
    tensors_.push_back({std::move(name), model_.dtype, shape});
  }
  void norm(std::string name, std::int64_t size) {
    tensors_.push_back({std::move(name), model_.norm_dtype, Shape{size}});
  }
  void mlp(const std::string& prefix,
           std::int64_t ffn,
           const std::vector<std::string>& names = {"gate_proj", "up_proj", "down_proj"}) {
    weight(prefix + names[0] + ".weight", {ffn, model_.hidden});
    weight(prefix + names[1] + ".weight", {ffn, model_.hidden});
    weight(prefix + names[2] + ".weight", {model_.hidden, ffn});
  }

  void layer(const std::string& prefix, bool experts) {
    norm(prefix + "input_layernorm.weight", model_.hidden);
    norm(prefix + "post_attention_layernorm.weight", model_.hidden);
    model_.deepseek() ? latent_attention(prefix + "self_attn.") : attention(prefix + "self_attn.");
    if (!experts) return mlp(prefix + "mlp.", model_.ffn);
    const bool mixtral = model_.family == "mixtral";
    const auto block = prefix + (mixtral ? "block_sparse_moe." : "mlp.");
    weight(block + "gate.weight", {model_.experts, model_.hidden});
    for (int e = 0; e < model_.experts; ++e) {
      const auto expert = fmt::format("{}experts.{}.", block, e);
      mixtral ? mlp(expert, model_.ffn, {"w1", "w3", "w2"}) : mlp(expert, model_.moe_ffn);
    }
    if (model_.family == "qwen2_moe") {
      mlp(block + "shared_expert.", model_.shared_ffn);
      weight(block + "shared_expert_gate.weight", {1, model_.hidden});
    }
    if (model_.deepseek()) mlp(block + "shared_experts.", 2 * model_.moe_ffn);
    if (model_.family == "deepseek_v3" && model_.expert_bias)
      weight(block + "gate.e_score_correction_bias", {model_.experts});
  }

  void attention(const std::string& prefix) {
    const std::int64_t queries = heads_ * model_.head_dim;
    const std::int64_t keys = model_.num_query_groups * model_.head_dim;
    for (const auto& [name, rows] :
         {std::pair{"q", queries}, std::pair{"k", keys}, std::pair{"v", keys}}) {
      weight(fmt::format("{}{}_proj.weight", prefix, name), {rows, model_.hidden});
      if (model_.family.starts_with("qwen2"))
        weight(fmt::format("{}{}_proj.bias", prefix, name), {rows});
    }
    if (model_.family.starts_with("qwen3")) {
      norm(prefix + "q_norm.weight", model_.head_dim);
      norm(prefix + "k_norm.weight", model_.head_dim);
    }
    weight(prefix + "o_proj.weight", {model_.hidden, queries});
    if (model_.inv_freq)
      tensors_.push_back({prefix + "rotary_emb.inv_freq", DType::kF32, Shape{model_.head_dim / 2}});
  }

  void latent_attention(const std::string& prefix) {
    const std::int64_t query_dim = model_.head_dim + model_.rope_dim;
    if (model_.q_lora > 0) {
      weight(prefix + "q_a_proj.weight", {model_.q_lora, model_.hidden});
      norm(prefix + "q_a_layernorm.weight", model_.q_lora);
      weight(prefix + "q_b_proj.weight", {heads_ * query_dim, model_.q_lora});
    } else {
      weight(prefix + "q_proj.weight", {heads_ * query_dim, model_.hidden});
    }
    weight(prefix + "kv_a_proj_with_mqa.weight", {model_.kv_lora + model_.rope_dim, model_.hidden});
    norm(prefix + "kv_a_layernorm.weight", model_.kv_lora);
    weight(prefix + "kv_b_proj.weight",
           {heads_ * (model_.head_dim + model_.v_dim), model_.kv_lora});
    weight(prefix + "o_proj.weight", {model_.hidden, heads_ * model_.v_dim});
  }

  const TinyModel& model_;
  std::int64_t heads_;
  std::vector<Tensor> tensors_;
};

std::string content_of(const Tensor& tensor, const TinyModel& model, std::mt19937_64& random) {
  const auto count = tensor.shape.product();
  std::string bytes(static_cast<std::size_t>(count * size_of(tensor.dtype)), '\0');
  const auto out = std::as_writable_bytes(std::span(bytes));
  std::normal_distribution<float> normal;
  for (std::int64_t i = 0; i < count; ++i) {
    float value = normal(random);
    if (tensor.name.ends_with("inv_freq")) {
      value = 1.0F /
              std::pow(10000.0F, 2.0F * static_cast<float>(i) / static_cast<float>(model.head_dim));
    }
    const auto size = static_cast<std::size_t>(size_of(tensor.dtype));
    distckpt::cast(DType::kF32, std::as_bytes(std::span(&value, 1)), tensor.dtype,
                   out.subspan(static_cast<std::size_t>(i) * size, size),
                   distckpt::CastRule::kRound);
  }
  return bytes;
}

std::string safetensors_bytes(const std::vector<std::pair<Tensor, const std::string*>>& tensors) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  std::int64_t at = 0;
  std::string payload;
  for (const auto& [tensor, bytes] : tensors) {
    header[tensor.name] = {
        {"dtype", safetensors_name(tensor.dtype)},
        {"shape", std::vector<std::int64_t>(tensor.shape.begin(), tensor.shape.end())},
        {"data_offsets", {at, at + static_cast<std::int64_t>(bytes->size())}}};
    at += static_cast<std::int64_t>(bytes->size());
    payload += *bytes;
  }
  const auto text = header.dump();
  std::string length;
  for (int i = 0; i < 8; ++i) length.push_back(static_cast<char>(text.size() >> (8 * i) & 0xFF));
  return length + text + payload;
}

void write_config(const TinyModel& model, const fs::path& folder) {
  nlohmann::ordered_json config{
      {"model_type", model.family},
      {"hidden_act", "silu"},
      {"hidden_size", model.hidden},
      {"intermediate_size", model.ffn},
      {"num_hidden_layers", model.num_layers},
      {"num_attention_heads", model.num_query_groups * model.heads_per_group},
      {"num_key_value_heads", model.num_query_groups},
      {"head_dim", model.head_dim},
      {"vocab_size", model.vocab},
      {"rms_norm_eps", 1e-6},
      {"rope_theta", 10000.0},
      {"max_position_embeddings", 128},
      {"tie_word_embeddings", model.tied}};
  const auto set = [&](const nlohmann::ordered_json& more) { config.update(more); };
  if (model.family == "mixtral") set({{"num_local_experts", model.experts}});
  if (model.family.ends_with("_moe")) {
    std::vector<int> dense(static_cast<std::size_t>(model.dense_layers));
    std::iota(dense.begin(), dense.end(), 0);
    set({{"num_experts", model.experts},
         {"moe_intermediate_size", model.moe_ffn},
         {"shared_expert_intermediate_size", model.shared_ffn},
         {"mlp_only_layers", dense}});
  }
  if (model.deepseek()) {
    set({{"num_key_value_heads", model.num_query_groups * model.heads_per_group},
         {"n_routed_experts", model.experts},
         {"n_shared_experts", 2},
         {"n_group", 1},
         {"topk_group", 1},
         {"first_k_dense_replace", model.dense_layers},
         {"moe_intermediate_size", model.moe_ffn},
         {"topk_method", model.expert_bias ? "noaux_tc" : "greedy"},
         {"q_lora_rank", nullptr},
         {"kv_lora_rank", model.kv_lora},
         {"qk_nope_head_dim", model.head_dim},
         {"qk_rope_head_dim", model.rope_dim},
         {"v_head_dim", model.v_dim},
         {"num_nextn_predict_layers", model.prediction_layers}});
    if (model.q_lora > 0) set({{"q_lora_rank", model.q_lora}});
  }
  if (!model.head.empty()) {
    nlohmann::ordered_json labels = nlohmann::ordered_json::object();
    for (int i = 0; i < model.labels; ++i) labels[std::to_string(i)] = fmt::format("LABEL_{}", i);
    set({{"architectures", {fmt::format("AnyFor{}Classification", model.head)}},
         {"id2label", labels}});
  }
  distckpt::write_text(folder / "config.json", config.dump(2) + "\n");
  distckpt::write_text(folder / "generation_config.json", "{\"eos_token_id\": 2}\n");
  distckpt::write_text(folder / "tokenizer.json", "{\"version\": \"1.0\"}");
}

}  // namespace

TinyModel random_tiny_model(std::mt19937_64& random) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  TinyModel model;
  const std::vector<std::string> families{"llama",     "mistral",     "qwen2",
                                          "qwen3",     "mixtral",     "qwen2_moe",
                                          "qwen3_moe", "deepseek_v2", "deepseek_v3"};
  model.family = families[static_cast<std::size_t>(draw(0, 8))];
  model.num_layers = draw(1, 6);
  model.num_query_groups = 1 << draw(0, 2);
  model.heads_per_group = draw(1, 3);
  model.head_dim = 2 * draw(1, 4);
  model.hidden = 4 * draw(1, 6);
  model.ffn = 4 * draw(1, 9);
  model.vocab = draw(5, 70);
  model.tied = draw(0, 1) == 1;
  model.repeat_tied_head = draw(0, 3) == 0;
  model.inv_freq = model.family == "llama" && draw(0, 3) == 0;
  model.dtype =
      std::vector{DType::kBF16, DType::kF16, DType::kF32}[static_cast<std::size_t>(draw(0, 2))];
  model.norm_dtype = draw(0, 2) == 0 ? DType::kF32 : model.dtype;
  model.num_files = draw(1, 4);
  model.experts = 2 * draw(1, 4);
  model.dense_layers = model.family == "mixtral" || draw(0, 1) == 0 ? 0 : draw(0, model.num_layers);
  model.moe_ffn = 4 * draw(1, 3);
  model.shared_ffn = 4 * draw(1, 3);
  model.q_lora = draw(0, 1) == 0 ? 0 : draw(1, 8);
  model.kv_lora = draw(1, 8);
  model.rope_dim = 2 * draw(1, 3);
  model.v_dim = 2 * draw(1, 4);
  model.expert_bias = draw(0, 2) > 0;
  if (draw(0, 4) == 0) model.head = draw(0, 1) == 0 ? "Token" : "Sequence";
  model.labels = draw(1, 3);
  const bool predicts =
      model.family == "deepseek_v3" && model.head.empty() && model.dense_layers < model.num_layers;
  model.prediction_layers = predicts ? draw(0, 2) : 0;
  return model;
}

void write_tiny_model(const TinyModel& model, const fs::path& folder, std::uint64_t seed) {
  fs::create_directories(folder);
  write_config(model, folder);
  std::mt19937_64 random(seed);
  auto tensors = Lister(model).list();
  std::ranges::shuffle(tensors, random);
  std::map<std::string, std::string> bytes;
  for (const auto& tensor : tensors) bytes.emplace(tensor.name, content_of(tensor, model, random));
  if (model.tied && model.repeat_tied_head && model.head.empty())
    bytes["lm_head.weight"] = bytes["model.embed_tokens.weight"];
  const auto* const head = model.tied ? "model.embed_tokens.weight" : "lm_head.weight";
  for (auto& [name, content] : bytes) {  // prediction layers repeat both
    if (name.ends_with("shared_head.head.weight")) content = bytes.at(head);
    if (name.starts_with("model.layers.") && name.ends_with("embed_tokens.weight"))
      content = bytes.at("model.embed_tokens.weight");
  }

  std::vector<std::vector<std::pair<Tensor, const std::string*>>> files(
      static_cast<std::size_t>(model.num_files));
  nlohmann::json index{{"metadata", {{"total_size", 0}}}};
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto file = i % files.size();
    files[file].emplace_back(tensors[i], &bytes.at(tensors[i].name));
    index["weight_map"][tensors[i].name] =
        distckpt::safetensors_filename(static_cast<int>(file), model.num_files);
  }
  for (int f = 0; f < model.num_files; ++f) {
    distckpt::write_text(folder / distckpt::safetensors_filename(f, model.num_files),
                         safetensors_bytes(files[static_cast<std::size_t>(f)]));
  }
  if (model.num_files > 1)
    distckpt::write_text(folder / distckpt::kSafetensorsIndex, index.dump(1));
}

models::ParallelConfig random_layout(const TinyModel& model, std::mt19937_64& random) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  models::ParallelConfig layout;
  // More ranks than query groups share out each group's queries. Widths are multiples of 4.
  const int heads = model.num_query_groups * model.heads_per_group;
  for (int doubled = 1; doubled <= 4 && heads % doubled == 0; doubled *= 2) {
    if (draw(0, 1) == 0) layout.tensor_model_parallel_size = doubled;
  }
  layout.make_vocab_size_divisible_by = draw(1, 16);
  if (model.has_experts() && model.dense_layers < model.num_layers) {
    if (model.experts % 2 == 0 && draw(0, 1) == 0) layout.expert_model_parallel_size = 2;
    if (draw(0, 1) == 0) layout.expert_tensor_parallel_size = 1;
  }
  const int stages = draw(1, model.num_layers);
  layout.pipeline_model_parallel_size = stages;
  if (stages == 1) return layout;
  if (model.num_layers % (2 * stages) == 0) layout.virtual_pipeline_model_parallel_size = 2;
  if (model.num_layers % stages == 0) return layout;
  // Uneven: one layer for each stage but the first, which takes the rest.
  layout.num_layers_in_first_pipeline_stage = model.num_layers - (stages - 1);
  return layout;
}

std::map<std::string, std::string> read_tree(const fs::path& folder) {
  std::map<std::string, std::string> tree;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) {
      tree.emplace(entry.path().lexically_relative(folder).string(),
                   distckpt::read_text(entry.path()));
    }
  }
  return tree;
}

}  // namespace ferry::support
