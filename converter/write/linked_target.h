// A safetensors file whose tensors are given boxes of the source's, and small files beside it: an
// adapter.
#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "converter/write/target.h"
#include "distckpt/formats/safetensors.h"

namespace ferry::converter {

// `links` name the header's entries by their index. `texts` are the contents of the files beside
// it, by name.
std::unique_ptr<FileTarget> make_linked_target(distckpt::SafetensorsHeader header,
                                               distckpt::TensorMap links,
                                               std::map<std::string, std::string> texts,
                                               const std::filesystem::path& folder);

}  // namespace ferry::converter
