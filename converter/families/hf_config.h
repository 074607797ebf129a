// config.json of Hugging Face, read into a TransformerConfig. A setting that would change the model
// and is not understood is an error: a converted model never differs silently.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "distckpt/base/dtype.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

// `source` names the file in messages. Throws Error(kCorrupt | kLayout).
models::TransformerConfig parse_hf_config(std::string_view text, std::string_view source);

// The number of prediction layers that it names, those included that have no counterparts here. 0
// of a model that passes through.
std::int64_t named_prediction_layers(std::string_view text, std::string_view source);

// The same text of a model without prediction layers.
std::string without_prediction_layers(std::string_view text, std::string_view source);

// False for a text that leaves it to its class whether embedding and output layer are one tensor.
bool says_whether_tied(std::string_view text, std::string_view source);

// The same text, which says that they are two.
std::string with_untied_ends(std::string_view text, std::string_view source);

// The same text with another dtype, written as save_pretrained writes it.
std::string with_dtype(std::string_view text, distckpt::DType dtype, std::string_view source);

// The class of a model that ends in scores, if transformers has none: users write one.
std::optional<std::string> class_that_transformers_lacks(const models::TransformerConfig& config,
                                                         std::string_view text,
                                                         std::string_view source);

// The same text of a model that ends in `config`'s classification head, under the name that
// transformers' class has.
std::string with_classification_head(std::string_view text,
                                     const models::TransformerConfig& config,
                                     std::string_view source);

}  // namespace ferry::converter
