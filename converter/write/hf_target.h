// A Hugging Face folder to be written: with the original headers where they are known, else as
// save_pretrained writes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "converter/open/checkpoint.h"
#include "converter/write/target.h"

namespace ferry::converter {

// True if the files get headers of the source's, and not new ones as save_pretrained makes them,
// without derived tensors.
bool keeps_headers(const HfForm& form,
                   std::optional<distckpt::DType> dtype,
                   std::optional<std::int64_t> max_shard_size);

// `tensors` are those of `source`, with the dtypes to be written. `source` must outlive the target.
// `dtype`: a cast, config.json says it too. `max_shard_size`: bytes of tensors per file, default
// the source's split, else 50 GB.
std::unique_ptr<Target> make_hf_target(const Checkpoint& source,
                                       const std::vector<distckpt::ModelTensor>& tensors,
                                       std::optional<distckpt::DType> dtype,
                                       std::optional<std::int64_t> max_shard_size,
                                       const std::filesystem::path& folder);

}  // namespace ferry::converter
