// Megatron's legacy format, as far as it can be read before the model is known: a file for each
// model parallel rank, its tensors under keys of the whole model, each a slice.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/formats/torch_save/torch_zip.h"
#include "distckpt/plan/layout.h"
#include "models/spec/parallel_config.h"

namespace ferry::converter {

struct RankFile {
  std::string name{};  // of its folder: "mp_rank_01_003"
  int tp = 0;
  int pp = 0;
  int ep = 0;
  distckpt::FileStorage storage{};
};

struct RankFileTensor {
  std::uint32_t file = 0;  // index into RankFiles::files
  distckpt::TensorItem item{};
};

struct RankFiles {
  models::ParallelConfig parallel{};
  std::vector<RankFile> files{};
  std::map<std::string, std::vector<RankFileTensor>> tensors{};  // by key, in the order of files
  std::vector<std::string> training_state{};
  std::optional<distckpt::Pickle> common{};  // the first file's: arguments and more
};

// Throws Error naming the file that is missing, not whole or of another model than the first.
RankFiles read_rank_files(const std::filesystem::path& folder);

}  // namespace ferry::converter
