// The families that the documents list are those that the program knows, and those that they call
// computed are those that a mesh takes.
#include "converter/families/families.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "converter/families/hf_config.h"
#include "converter/families/model_map.h"
#include "distckpt/base/error.h"
#include "models/spec/sharding.h"

namespace ferry::converter {
namespace families_test {

std::string document(std::string_view name) {
  const char* root = std::getenv("FERRY_SOURCE_ROOT");
  if (root == nullptr) return {};
  std::ifstream file(std::filesystem::path(root) / name);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The rows of the table behind `heading`, up to the line of value heads; their first cells.
std::string converted_families() {
  const auto text = document("docs/converting.md");
  const auto begin = text.find("\n|---|---|\n", text.find("## Families and dtypes"));
  const auto end = text.find("\n| `ForSequenceClassification`", begin);
  std::string cells;
  const std::regex row("\n\\| ([^|]*) \\|");
  const auto table = text.substr(begin, end - begin);
  for (std::sregex_iterator at(table.begin(), table.end(), row), none; at != none; ++at)
    cells += (cells.empty() ? "" : ", ") + (*at)[1].str();
  return cells;
}

// The cell beside `title` in the table of README, up to a semicolon.
std::string readme_cell(const std::string& title) {
  const auto text = document("README.md");
  const auto begin = text.find("| " + title + " | ");
  if (begin == std::string::npos) return {};
  const auto cell = text.substr(begin + title.size() + 5);
  return cell.substr(0, cell.find_first_of("|;\n"));
}

// "GLM-4 of April 2025 (`glm4`), Qwen3.5 and Qwen3.6 that see": GLM-4, Qwen3.5, Qwen3.6.
std::set<std::string> names(std::string text) {
  text = std::regex_replace(text, std::regex("\\([^)]*\\)| of April 2025| with experts| that see"),
                            "");
  text = std::regex_replace(text, std::regex(" and "), ", ");
  std::set<std::string> found;
  const std::regex name("[^,]*[^, ]");
  for (std::sregex_iterator at(text.begin(), text.end(), name), none; at != none; ++at)
    found.insert(std::regex_replace(at->str(), std::regex("^ +"), ""));
  return found;
}

TEST(Families, AreThoseThatConvertingLists) {
  std::vector<std::string> listed;
  const auto cells = converted_families();
  const std::regex code("`([^`]*)`");
  for (std::sregex_iterator at(cells.begin(), cells.end(), code), none; at != none; ++at)
    listed.push_back((*at)[1].str());
  const auto known = known_families();
  std::vector<std::string> in_code(known.begin(), known.end());
  std::ranges::sort(listed);
  std::ranges::sort(in_code);
  EXPECT_EQ(listed, in_code) << "docs/converting.md lists each model_type once, in backticks";
}

// A config.json of each family: those of tests/data, and, for a model_type that no model there has,
// that of one with the same members.
std::map<std::string, nlohmann::json> configurations() {
  std::map<std::string, nlohmann::json> found;
  const std::filesystem::path root(std::getenv("FERRY_SOURCE_ROOT"));
  for (const auto& entry : std::filesystem::directory_iterator(root / "tests/data")) {
    const auto path = entry.path() / "hf/config.json";
    if (!entry.path().filename().string().starts_with("hf_") || !std::filesystem::exists(path))
      continue;
    auto config = nlohmann::json::parse(std::ifstream(path));
    const auto type = config["model_type"].get<std::string>();
    found.emplace(type, std::move(config));
  }
  const auto alike = [&](const std::string& type, const std::string& other) {
    auto config = found.at(other);
    config["model_type"] = type;
    found.emplace(type, std::move(config));
  };
  alike("kimi_k2", "deepseek_v3");
  alike("deepseek_v32", "glm_moe_dsa");
  alike("mistral", "llama");
  alike("ministral", "llama");
  alike("deepseek_v4", "llama");
  found.emplace("gemma4_unified_text", found.at("gemma4_unified").at("text_config"));
  for (const std::string type : {"qwen3_5", "qwen3_5_moe"}) {
    found.emplace(type,
                  nlohmann::json{{"model_type", type}, {"text_config", found.at(type + "_text")}});
  }
  return found;
}

// The names before each pair of parentheses, and the model types in it.
std::map<std::string, std::vector<std::string>> types_of_names() {
  std::map<std::string, std::vector<std::string>> found;
  const auto cells = converted_families();
  const std::regex group("([^()]*)\\(([^)]*)\\)"), code("`([^`]*)`");
  for (std::sregex_iterator at(cells.begin(), cells.end(), group), none; at != none; ++at) {
    const auto types = (*at)[2].str();
    for (const auto& name : names((*at)[1].str())) {
      for (std::sregex_iterator type(types.begin(), types.end(), code); type != none; ++type)
        found[name].push_back((*type)[1].str());
    }
  }
  return found;
}

bool is_computed(const nlohmann::json& config) {
  const auto parsed = parse_hf_config(config.dump(), "config.json");
  try {
    models::check_fits(parsed, models::MeshShape(models::ParallelConfig{}, 1));
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("are not computed"), std::string::npos)
        << error.what();
    return false;
  }
  return true;
}

// A family that is computed under one of its model types counts as computed.
TEST(Families, HaveAsManyParametersAsTheirTensorsHaveElements) {
  std::int64_t counted = 0;
  for (const auto& [type, config] : configurations()) {
    const auto parsed = parse_hf_config(config.dump(), "config.json");
    std::int64_t elements = 0;
    for (const auto& tensor : make_model_map(parsed).tensors) elements += tensor.shape.product();
    EXPECT_EQ(count_parameters(parsed), elements) << type;
    counted += elements > 0 ? 1 : 0;
  }
  EXPECT_GT(counted, 25);
}

TEST(Families, AreComputedWhereReadmeSaysSo) {
  const auto configs = configurations();
  std::set<std::string> computed, converted, see;
  for (const auto& [name, types] : types_of_names()) {
    bool one_is_computed = false;
    for (const auto& type : types) {
      ASSERT_TRUE(configs.contains(type)) << type;
      one_is_computed = one_is_computed || is_computed(configs.at(type));
      if (find_family(type).configure_vision != nullptr) see.insert(name);
    }
    (one_is_computed ? computed : converted).insert(name);
  }
  ASSERT_GT(computed.size(), 20);
  auto listed = names(readme_cell("families"));
  listed.merge(names(readme_cell("families with experts")));
  EXPECT_EQ(listed, computed);
  EXPECT_EQ(names(readme_cell("families, converted only")), converted);
  EXPECT_EQ(names(readme_cell("families that see images")), see);
}

// The code of a file, without comments.
std::string code_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::string code, line;
  while (std::getline(file, line)) code += line.substr(0, line.find("//")) + "\n";
  return code;
}

// Families differ elsewhere by what their files say of them, and not by their names.
TEST(Families, AreNamedInTheirOwnFilesAlone) {
  const std::filesystem::path root(std::getenv("FERRY_SOURCE_ROOT"));
  int files = 0;
  for (const auto* room : {"models", "converter"}) {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(root / room)) {
      const auto& path = entry.path();
      const bool of_a_family = path.parent_path().parent_path() == root / "converter" / "families";
      if (!std::set<std::string>{".h", ".cc", ".cu", ".cuh"}.contains(path.extension().string()) ||
          of_a_family)
        continue;
      ++files;
      const auto code = code_of(path);
      for (const auto type : known_families())
        EXPECT_EQ(code.find(fmt::format("\"{}\"", type)), std::string::npos)
            << path << " names " << type;
    }
  }
  EXPECT_GT(files, 200);
}

TEST(Families, NamesWithoutTransformersPrefixAreCompleted) {
  const auto full = [](const char* family, const char* name) {
    return name_with_prefix(find_family(family), name).value_or("");
  };
  EXPECT_EQ(full("llama", "layers.0.mlp.up_proj.weight"), "model.layers.0.mlp.up_proj.weight");
  EXPECT_EQ(full("llama", "norm.weight"), "model.norm.weight");
  EXPECT_EQ(full("qwen2_5_vl", "language_model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(full("qwen3_vl", "visual.pos_embed.weight"), "model.visual.pos_embed.weight");
  EXPECT_EQ(full("nemotron_h", "layers.0.norm.weight"), "backbone.layers.0.norm.weight");
  for (const auto* name : {"model.norm.weight", "lm_head.weight", "mtp.norm.weight", "layer.0.a"})
    EXPECT_EQ(full("qwen3_next", name), "") << name;
  EXPECT_EQ(full("gemma3", "vision_tower.vision_model.post_layernorm.bias"), "");
}

TEST(Families, NamesOfTransformersModulesBecomeThoseOfFiles) {
  constexpr std::array<std::array<const char*, 3>, 9> kNames{{
      {"qwen2_5_vl", "model.language_model.norm.weight", "model.norm.weight"},
      {"qwen2_5_vl", "model.visual.merger.mlp.0.bias", "visual.merger.mlp.0.bias"},
      {"gemma3", "lm_head.weight", "language_model.lm_head.weight"},
      {"gemma3", "model.vision_tower.head.a", "vision_tower.vision_model.head.a"},
      {"gemma3", "model.vision_tower.vision_model.head.a", "vision_tower.vision_model.head.a"},
      {"mistral3", "model.vision_tower.ln_pre.weight", "vision_tower.ln_pre.weight"},
      {"nemotron_h", "model.embeddings.weight", "backbone.embeddings.weight"},
      {"minimax_m2", "model.layers.0.mlp.experts.a", "model.layers.0.block_sparse_moe.experts.a"},
      {"ernie4_5_moe", "model.layers.1.mlp.gate.moe_statics.a", "model.layers.1.mlp.moe_statics.a"},
  }};
  for (const auto& [family, module, file] : kNames)
    EXPECT_EQ(file_name(find_family(family), module), file) << family;
  for (const auto* name : {"model.layers.0.mlp.gate.weight", "visual.merger.ln_q.weight", "x.y"})
    EXPECT_EQ(file_name(find_family("qwen2_5_vl"), name), name);
}

TEST(Families, ModulesOfTransformersAreFoundInFiles) {
  using Names = std::vector<std::string>;
  const auto expect = [](const char* family, const Names& files, const std::string& module) {
    const auto& of = find_family(family);
    EXPECT_EQ(module_name(of, files.front()), module) << family;
    const auto found = file_names(of, module);
    EXPECT_EQ(Names(found.begin(), found.begin() + std::ssize(files)), files) << family;
    EXPECT_EQ(found.back(), module) << family;  // of files that have transformers' own names
  };
  expect("qwen3", {"model.layers.0.mlp.up_proj"}, "model.layers.0.mlp.up_proj");
  expect("mixtral", {"model.layers.0.block_sparse_moe.gate"}, "model.layers.0.mlp.gate");
  expect("nemotron_h", {"backbone.layers.0.mixer.q_proj"}, "model.layers.0.mixer.q_proj");
  expect("qwen2_5_vl", {"model.norm.weight"}, "model.language_model.norm.weight");
  expect("qwen2_5_vl", {"visual.merger.mlp.0"}, "model.visual.merger.mlp.0");
  expect("kimi_k25", {"language_model.lm_head"}, "lm_head");
  expect("gemma3", {"language_model.model.norm"}, "model.language_model.norm");
  expect("gemma3", {"vision_tower.vision_model.head", "vision_tower.head"},
         "model.vision_tower.head");
  // A name that an older release gave, which is that of files.
  EXPECT_EQ(file_names(find_family("qwen2_5_vl"), "model.layers.0.mlp.up_proj").front(),
            "model.layers.0.mlp.up_proj");
}

}  // namespace families_test
}  // namespace ferry::converter
