// What the reader of a format finds: boxes of stored tensors, and what else the files tell. What
// the tensors are called says how a Checkpoint is made of it: hf_names.h, megatron_names.h.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "converter/hf_folder.h"
#include "distckpt/file_box_io.h"
#include "distckpt/layout.h"
#include "distckpt/pickle.h"

namespace ferry::converter {

struct Stored {
  distckpt::Layout layout{};  // of the model's tensors alone
  std::vector<distckpt::ExpectedChecksum> checksums{};
  std::optional<HfForm> hf{};
  std::vector<std::string> training_state{};  // keys of what is not the model

  // Megatron's only.
  std::optional<distckpt::Pickle> common{};  // holds the arguments
  std::vector<std::string> objects{};        // keys of sharded objects
  std::filesystem::path derived{};           // a safetensors file of derived tensors
};

}  // namespace ferry::converter
