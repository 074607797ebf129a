// Hugging Face safetensors: 8 bytes of header length, a JSON header, the tensors' bytes.
// docs/formats/safetensors.md.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"
#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

struct SafetensorsEntry {
  std::string name{};
  DType dtype = DType::kBF16;
  Shape shape{};
  std::int64_t begin = 0;  // in the file
  std::int64_t end = 0;
};

struct SafetensorsHeader {
  std::string filename{};
  std::string
      prefix{};  // the file's bytes before the first tensor: length and header, byte for byte
  std::map<std::string, std::string> metadata{};
  std::vector<SafetensorsEntry> entries{};  // in the order of their bytes
  std::int64_t file_size = 0;
};

// Reads and checks a file's header against itself and against the file's size, before anything of
// that size is allocated. Throws Error(kCorrupt) naming file, tensor and byte.
SafetensorsHeader read_safetensors_header(const std::filesystem::path& path);

// The same for a prefix that was kept without its file; `source` names it in messages. No tensor
// may end beyond `file_size`.
SafetensorsHeader parse_safetensors_prefix(
    std::string prefix,
    std::string filename,
    std::string_view source,
    std::int64_t file_size = std::numeric_limits<std::int64_t>::max());

// The header that the safetensors library writes for these tensors: sorted by dtype and name, no
// gaps, padded to 8 bytes.
SafetensorsHeader make_safetensors_header(std::string filename,
                                          std::vector<SafetensorsEntry> tensors,
                                          std::map<std::string, std::string> metadata);

// Adds the file and its tensors to a layout. Throws Error(kLayout) if a tensor is there already.
void add_to_layout(const SafetensorsHeader& header,
                   const std::filesystem::path& folder,
                   Layout& layout);

}  // namespace ferry::distckpt
