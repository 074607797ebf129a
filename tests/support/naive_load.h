// Fills a model from a Hugging Face folder the plain way, tensor after tensor, without a plan: what
// the executors are held against.
#pragma once

#include <filesystem>

#include "models/gpt_model.h"

namespace ferry::support {

distckpt::TransformerConfig read_config(const std::filesystem::path& hf_folder);

void naive_load(models::GPTModel& model, const std::filesystem::path& hf_folder);

}  // namespace ferry::support
