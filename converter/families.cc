#include "converter/families.h"

#include <array>
#include <string>
#include <vector>

#include "converter/rules/dense.h"
#include "distckpt/error.h"

namespace ferry::converter {
namespace {

const std::array kFamilies{
    Family{"llama", "LlamaForCausalLM", &kDenseRules},
    Family{"mistral", "MistralForCausalLM", &kDenseRules},
    Family{"qwen2", "Qwen2ForCausalLM", &kDenseRules},
    Family{"qwen3", "Qwen3ForCausalLM", &kDenseRules},
};

}  // namespace

std::span<const Family> families() {
  return kFamilies;
}

const Family& find_family(std::string_view model_type) {
  std::vector<std::string_view> known;
  for (const auto& family : kFamilies) {
    if (family.model_type == model_type) return family;
    known.push_back(family.model_type);
  }
  throw Error(
      ErrorKind::kLayout, fmt::format("the model_type \"{}\" is not known", model_type),
      fmt::format("known are {}; a family is a table in converter/rules", fmt::join(known, ", ")));
}

std::string_view infer_family(const distckpt::TransformerConfig& config) {
  if (config.qk_layernorm) return "qwen3";
  if (config.add_qkv_bias) return "qwen2";
  return config.sliding_window ? "mistral" : "llama";
}

}  // namespace ferry::converter
