#include <string>

#include "converter/families/families.h"
#include "converter/families/family.h"
#include "converter/families/hf_config.h"
#include "converter/families/megatron_args.h"
#include "converter/families/quantization.h"
#include "tests/fuzz/model_properties.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

using models::TransformerConfig;

// A rewritten dtype, or a configuration without its quantisation, describes the same model.
void expect_rewritten_alike(std::string_view text, const TransformerConfig& config) {
  const auto retyped = converter::with_dtype(text, distckpt::DType::kF32, "fuzz");
  expect(converter::parse_hf_config(retyped, "retyped") == config, "with_dtype changes the model");
  expect(converter::with_dtype(retyped, distckpt::DType::kF32, "fuzz") == retyped,
         "with_dtype changes its own text");
  const auto plain = converter::without_quantization(text, distckpt::DType::kBF16, "fuzz");
  expect(converter::parse_hf_config(plain, "plain") == config,
         "without_quantization changes the model");
  expect(!converter::parse_quantization(plain, "plain"), "is still quantised");
}

}  // namespace

void hf_config(std::string_view input) {
  TransformerConfig config;
  const bool quantization = accepts([&] { converter::parse_quantization(input, "fuzz"); });
  if (!accepts([&] { config = converter::parse_hf_config(input, "fuzz"); })) return;
  if (converter::family_of(config.family).passes_through) return;  // has no form of Megatron's
  expect(quantization, "the configuration is taken, its quantisation is not");
  expect_rewritten_alike(input, config);
  expect_sound(config);
  expect_args_alike(config);
}

}  // namespace ferry::fuzz
