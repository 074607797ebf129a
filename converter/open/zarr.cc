// Megatron-Core's distributed checkpoint in its zarr backend, which releases up to 0.15 could
// write: the keys of torch_dist, a zarr array each.
#include "distckpt/formats/zarr.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "converter/families/megatron_links.h"
#include "converter/open/formats.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/formats/torch_save/torch_save.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

void check_backend(const fs::path& path) {
  const auto source = path.string();
  const auto metadata = distckpt::parse_json(distckpt::read_text(path, 1 << 20), source);
  const auto backend = distckpt::json_string_at(metadata, "sharded_backend", source);
  require(backend == "zarr", ErrorKind::kLayout,
          "{}: sharded_backend is \"{}\", but zarr arrays lie beside it", source, backend);
}

}  // namespace

Stored read_zarr(const Location& location, const OpenOptions& options) {
  check_backend(location.folder / distckpt::kTorchDistConfig);
  Stored stored{.megatron_names = true};
  stored.hf = find_hf_form(location, options);
  const auto common = location.folder / distckpt::kCommon;
  if (distckpt::source_exists(common)) {
    const distckpt::ReadFile file(common);
    stored.common = distckpt::read_torch_object(file, 0, file.size(), distckpt::object_globals());
  }
  std::vector<fs::path> folders;
  for (const auto& path : distckpt::list_source(location.folder)) {
    if (distckpt::source_is_folder(path)) folders.push_back(path);
  }
  std::ranges::sort(folders);
  for (const auto& folder : folders) {
    const auto key = folder.filename().string();
    if (!distckpt::is_zarr_array(folder)) {
      for (const auto& path : distckpt::list_source(folder)) {
        if (path.extension() != ".pt") continue;
        auto object = fmt::format("{}/{}", key, path.stem().string());
        if (is_training_state(key)) stored.training_state.push_back(object);
        stored.objects.push_back(std::move(object));
      }
    } else if (is_training_state(key)) {
      stored.training_state.push_back(key);
    } else {
      distckpt::add_zarr_array(folder, key, stored.layout);
    }
  }
  return stored;
}

}  // namespace ferry::converter
