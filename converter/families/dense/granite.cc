// Granite 3 without experts: Llama's layers, with factors of embeddings, of attention's products
// and of what joins the stream, and a divisor of logits. Megatron's arguments name none of them.
#include "converter/families/family.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using models::TransformerConfig;

constexpr Family kGranite[] = {
    {.model_type = "granite",
     .names = &kLlamaNames,
     .configure =
         [](const ConfigFields& fields, TransformerConfig& config) {
           read_linear_biases(fields, config);
           const auto factor = [&](const char* key) {
             return fields.optional_number(key).value_or(1.0);
           };
           config.embedding_multiplier = factor("embedding_multiplier");
           config.softmax_scale = factor("attention_multiplier");
           config.residual_multiplier = factor("residual_multiplier");
           config.logits_scaling = factor("logits_scaling");
           require(config.logits_scaling != 0, ErrorKind::kCorrupt, "{}: logits_scaling is 0",
                   fields.source());
         }},
};

}  // namespace

const std::span<const Family> kGraniteFamilies = kGranite;

}  // namespace ferry::converter
