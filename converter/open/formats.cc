#include "converter/open/formats.h"

#include "converter/stored/sidecar.h"
#include "distckpt/base/error.h"

namespace ferry::converter {

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
