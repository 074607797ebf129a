// config.json of Hugging Face, read into a TransformerConfig. A setting that would change the model
// and is not understood is an error: a converted model never differs silently.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

// `source` names the file in messages. Throws Error(kCorrupt | kLayout).
models::TransformerConfig parse_hf_config(std::string_view text, std::string_view source);

// How the weights of a checkpoint are quantised.
struct Quantization {
  enum class Method : std::uint8_t {
    kFp8,    // E4M3 in blocks, under the weight's name, beside ....weight_scale_inv
    kMxfp4,  // of experts: ...._blocks and ...._scales in place of the weight
  };
  Method method = Method::kFp8;
  distckpt::Dims block{};  // [128, 128]; of the tensor as it is stored
};
inline constexpr std::string_view kScaleSuffix = "_scale_inv";
inline constexpr std::string_view kBlocksSuffix = "_blocks";
inline constexpr std::string_view kBlockScalesSuffix = "_scales";

// Nothing if the checkpoint is not quantised. Throws Error(kLayout) for every other way of
// quantising.
std::optional<Quantization> parse_quantization(std::string_view text, std::string_view source);

// The name of the weight whose elements or scales a tensor of that name holds.
std::string_view quantized_weight(std::string_view name);

// The same text without its quantisation, and of the dtype to which the weights were dequantised.
std::string without_quantization(std::string_view text,
                                 distckpt::DType dtype,
                                 std::string_view source);

// The same text of weights that are quantised so, FP8 in blocks of 128 x 128, but for those
// modules: as DeepSeek-V3 and GPT-OSS are published.
std::string with_quantization(std::string_view text,
                              Quantization::Method method,
                              const std::vector<std::string>& not_converted,
                              std::string_view source);

// The same text of a model without prediction layers.
std::string without_prediction_layers(std::string_view text, std::string_view source);

// The same text with another dtype, written as save_pretrained writes it.
std::string with_dtype(std::string_view text, distckpt::DType dtype, std::string_view source);

// The same text of a model that ends in `config`'s classification head, under the name that
// transformers' class has.
std::string with_classification_head(std::string_view text,
                                     const models::TransformerConfig& config,
                                     std::string_view source);

}  // namespace ferry::converter
