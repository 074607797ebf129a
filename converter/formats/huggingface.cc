// A Hugging Face folder of safetensors files.
#include <utility>

#include "converter/formats/formats.h"

namespace ferry::converter {

Stored read_huggingface(const Location& location) {
  Stored stored{.hf = read_hf_folder(location.folder)};
  for (const auto& header : stored.hf->headers)
    distckpt::add_to_layout(header, location.folder, stored.layout);
  return stored;
}

}  // namespace ferry::converter
