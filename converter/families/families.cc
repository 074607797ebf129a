#include "converter/families/families.h"

#include <array>
#include <string>
#include <vector>

#include "converter/families/tables.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

const std::array kFamilies{
    Family{"llama", &kDenseRules},          Family{"mistral", &kDenseRules},
    Family{"qwen2", &kDenseRules},          Family{"qwen3", &kDenseRules},
    Family{"mixtral", &kMixtralRules},      Family{"qwen2_moe", &kQwenMoeRules},
    Family{"qwen3_moe", &kQwenMoeRules},    Family{"deepseek_v2", &kDeepSeekRules},
    Family{"deepseek_v3", &kDeepSeekRules},
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
  throw Error(ErrorKind::kLayout, fmt::format("the model_type \"{}\" is not known", model_type),
              fmt::format("known are {}; docs/adding_a_family.md says how to add a table",
                          fmt::join(known, ", ")));
}

std::string_view infer_family(const models::TransformerConfig& config) {
  if (config.multi_latent_attention) {
    return config.moe_router_enable_expert_bias ? "deepseek_v3" : "deepseek_v2";
  }
  if (config.num_moe_experts > 0) {
    if (config.qk_layernorm) return "qwen3_moe";
    return config.add_qkv_bias ? "qwen2_moe" : "mixtral";
  }
  if (config.qk_layernorm) return "qwen3";
  if (config.add_qkv_bias) return "qwen2";
  return config.sliding_window ? "mistral" : "llama";
}

}  // namespace ferry::converter
