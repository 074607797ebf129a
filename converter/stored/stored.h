// The result of a format's reader: boxes of stored tensors, and everything else that the files
// tell. The tensors' names decide how a Checkpoint is made of it: hf_opener.h, megatron_opener.h.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "converter/families/model_map.h"
#include "converter/stored/hf_folder.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/tensor_map.h"

namespace ferry::converter {

// A further copy of a stored tensor, which has to hold the same bytes.
struct Replica {
  distckpt::TensorLayout tensor{};
  std::string of{};
};

// Keys and shapes of what is stored.
using TensorOutline = std::vector<std::pair<std::string, distckpt::Shape>>;

struct Stored {
  bool megatron_names = false;  // else Hugging Face's
  distckpt::Layout layout{};    // of the model's tensors alone
  std::vector<Replica> replicas{};
  std::vector<distckpt::ExpectedChecksum> checksums{};
  std::optional<HfForm> hf{};
  std::vector<std::string> training_state{};  // keys of what is not the model
  std::int64_t num_adapter_tensors = 0;       // factors of a LoRA adapter beside it

  // Megatron's only.
  std::optional<distckpt::Pickle> common{};  // holds the arguments
  bool common_is_apart = false;              // a dict of what is not sharded, to be carried along
  std::vector<std::string> objects{};        // keys of sharded objects
  std::optional<distckpt::SafetensorsHeader> derived{};  // of the file of derived tensors

  // For ranks' slices, which only the model tells how to put together: the tensors as far as their
  // keys and rows are known, and a function that fills in layout, checksums and replicas.
  TensorOutline outline{};
  std::function<void(const ModelMap&, Stored&)> assemble{};
};

// Throws Error(kLayout) for a tensor of a dtype that no weight of the families has.
void require_weight_dtype(const std::string& name, distckpt::DType dtype);

// Adds the replicas to a layout whose tensors are linked: further copies of what those hold.
void link_replicas(std::vector<Replica> replicas,
                   distckpt::Layout& layout,
                   distckpt::TensorMap& map);

}  // namespace ferry::converter
