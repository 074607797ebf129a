// config.json of Hugging Face, read into a TransformerConfig. A setting that would change the model
// and is not understood is an error: a converted model never differs silently.
#pragma once

#include <string>
#include <string_view>

#include "distckpt/dtype.h"
#include "distckpt/transformer_config.h"

namespace ferry::converter {

// `source` names the file in messages. Throws Error(kCorrupt | kLayout).
distckpt::TransformerConfig parse_hf_config(std::string_view text, std::string_view source);

// The same text with another dtype, written as save_pretrained writes it.
std::string with_dtype(std::string_view text, distckpt::DType dtype, std::string_view source);

}  // namespace ferry::converter
