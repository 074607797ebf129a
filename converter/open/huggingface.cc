// A Hugging Face folder of safetensors files.
#include <utility>

#include "converter/open/formats.h"

namespace ferry::converter {

Stored read_huggingface(const Location& location, const OpenOptions& options) {
  Stored stored{.hf = read_hf_folder(location.folder, options.links, options.incomplete)};
  for (const auto& header : stored.hf->headers)
    distckpt::add_to_layout(header, location.folder, stored.layout);
  return stored;
}

}  // namespace ferry::converter
