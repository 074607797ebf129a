// Ferry's own archive to be written: the model's tensors in Hugging Face terms, and what a sidecar
// holds, in HDF5 files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <vector>

#include "converter/open/checkpoint.h"
#include "converter/write/target.h"

namespace ferry::converter {

// `tensors` are those of `source`, with the dtypes to be written. `source` must outlive the target.
// `dtype`: a cast, config.json says it too and headers are not kept. `max_shard_size`: bytes of
// tensors per file, default one file.
std::unique_ptr<Target> make_archive_target(const Checkpoint& source,
                                            const std::vector<distckpt::ModelTensor>& tensors,
                                            std::optional<distckpt::DType> dtype,
                                            std::optional<std::int64_t> max_shard_size,
                                            const std::filesystem::path& folder);

}  // namespace ferry::converter
