#include "converter/open/formats.h"

#include <utility>

#include "converter/stored/sidecar.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/archive/shard_store.h"

namespace ferry::converter {
namespace {

// A Hugging Face folder of safetensors files.
Stored read_huggingface(const Location& location, const OpenOptions& options) {
  Stored stored{.hf = read_hf_folder(location.folder, options.links, options.incomplete)};
  for (const auto& header : stored.hf->headers)
    distckpt::add_to_layout(header, location.folder, stored.layout);
  return stored;
}

}  // namespace

Stored read_archive(const Location& location) {
  auto store = distckpt::read_shard_store(location.folder);
  return {.layout = std::move(store.layout), .hf = form_of_sidecar(store.files, location.folder)};
}

Stored read_stored(const Location& location, const OpenOptions& options) {
  switch (location.format) {
    case Format::kHuggingFace:
      return read_huggingface(location, options);
    case Format::kTorchSave:
      return read_torch_save(location, options);
    case Format::kTorchDist:
      return read_torch_dist(location, options);
    case Format::kLegacy:
      return read_legacy(location, options);
    case Format::kDcp:
      return read_dcp(location, options);
    case Format::kZarr:
      return read_zarr(location, options);
    case Format::kFsdp:
      return read_fsdp(location, options);
    case Format::kArchive:
      return read_archive(location);
  }
  fail(ErrorKind::kBug, "no reader of format {}", to_string(location.format));
}

HfForm hf_form_of(const Location& location, const OpenOptions& options) {
  if (location.has_own_config()) return read_hf_companions(location.config_folder(), options.links);
  if (options.hf_config.empty()) {
    throw Error(ErrorKind::kNotFound,
                fmt::format("{}: holds no {}", location.folder.string(), distckpt::kHfConfig),
                "name the folder of its config.json with --hf-config");
  }
  return read_hf_config(options.hf_config, options.links);
}

std::optional<HfForm> find_hf_form(const Location& location, const OpenOptions& options) {
  if (!options.hf_config.empty()) return read_hf_config(options.hf_config, options.links);
  if (!location.hf.empty()) return read_hf_config(location.hf, options.links);
  return read_sidecar(location.folder, options.links);
}

}  // namespace ferry::converter
