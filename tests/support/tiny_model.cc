#include "tests/support/tiny_model.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "distckpt/box.h"
#include "distckpt/cast.h"
#include "distckpt/error.h"
#include "distckpt/file_io.h"
#include "distckpt/filenames.h"

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

std::vector<Tensor> tensors_of(const TinyModel& model) {
  const std::int64_t heads = model.num_query_groups * model.heads_per_group;
  const std::int64_t queries = heads * model.head_dim;
  const std::int64_t keys = model.num_query_groups * model.head_dim;
  const auto weight = [&](std::string name, Shape shape) {
    return Tensor{std::move(name), model.dtype, shape};
  };
  const auto norm = [&](std::string name, std::int64_t size) {
    return Tensor{std::move(name), model.norm_dtype, Shape{size}};
  };
  std::vector<Tensor> tensors{weight("model.embed_tokens.weight", {model.vocab, model.hidden}),
                              norm("model.norm.weight", model.hidden)};
  if (!model.tied || model.repeat_tied_head)
    tensors.push_back(weight("lm_head.weight", {model.vocab, model.hidden}));
  for (int l = 0; l < model.num_layers; ++l) {
    const auto prefix = fmt::format("model.layers.{}.", l);
    tensors.push_back(norm(prefix + "input_layernorm.weight", model.hidden));
    tensors.push_back(norm(prefix + "post_attention_layernorm.weight", model.hidden));
    for (const auto& [name, rows] :
         {std::pair{"q", queries}, std::pair{"k", keys}, std::pair{"v", keys}}) {
      tensors.push_back(
          weight(fmt::format("{}self_attn.{}_proj.weight", prefix, name), {rows, model.hidden}));
      if (model.family == "qwen2") {
        tensors.push_back(weight(fmt::format("{}self_attn.{}_proj.bias", prefix, name), {rows}));
      }
    }
    if (model.family == "qwen3") {
      tensors.push_back(norm(prefix + "self_attn.q_norm.weight", model.head_dim));
      tensors.push_back(norm(prefix + "self_attn.k_norm.weight", model.head_dim));
    }
    tensors.push_back(weight(prefix + "self_attn.o_proj.weight", {model.hidden, queries}));
    tensors.push_back(weight(prefix + "mlp.gate_proj.weight", {model.ffn, model.hidden}));
    tensors.push_back(weight(prefix + "mlp.up_proj.weight", {model.ffn, model.hidden}));
    tensors.push_back(weight(prefix + "mlp.down_proj.weight", {model.hidden, model.ffn}));
    if (model.inv_freq) {
      tensors.push_back(
          {prefix + "self_attn.rotary_emb.inv_freq", DType::kF32, Shape{model.head_dim / 2}});
    }
  }
  return tensors;
}

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
  const nlohmann::ordered_json config{
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
  model.family = std::vector<std::string>{"llama", "mistral", "qwen2",
                                          "qwen3"}[static_cast<std::size_t>(draw(0, 3))];
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
  return model;
}

void write_tiny_model(const TinyModel& model, const fs::path& folder, std::uint64_t seed) {
  fs::create_directories(folder);
  write_config(model, folder);
  std::mt19937_64 random(seed);
  auto tensors = tensors_of(model);
  std::ranges::shuffle(tensors, random);
  std::map<std::string, std::string> bytes;
  for (const auto& tensor : tensors) bytes.emplace(tensor.name, content_of(tensor, model, random));
  if (model.tied && model.repeat_tied_head)
    bytes["lm_head.weight"] = bytes["model.embed_tokens.weight"];

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
