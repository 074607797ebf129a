// Fills a model from a Hugging Face folder the plain way, tensor after tensor, without a plan: what
// the executors are held against.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "models/gpt_model.h"

namespace ferry::support {

models::TransformerConfig read_config(const std::filesystem::path& hf_folder);

// Tensors under Hugging Face's names, as what a rank holds of each of a model's parameters, in
// their order: in fp64. Names that `read` does not have (an undefined tensor) give an undefined
// tensor.
std::vector<at::Tensor> naive_parts(const models::GPTModel& model,
                                    const std::filesystem::path& hf_folder,
                                    const std::function<at::Tensor(const std::string& name)>& read);

void naive_load(models::GPTModel& model, const std::filesystem::path& hf_folder);

}  // namespace ferry::support
