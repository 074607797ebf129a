// Ferry's own archive.
#include <utility>

#include "converter/open/formats.h"
#include "converter/stored/sidecar.h"
#include "distckpt/formats/archive/shard_store.h"

namespace ferry::converter {

Stored read_archive(const Location& location) {
  auto store = distckpt::read_shard_store(location.folder);
  return {.layout = std::move(store.layout), .hf = form_of_sidecar(store.files, location.folder)};
}

}  // namespace ferry::converter
