// Megatron-Core's distributed checkpoint.
#include "distckpt/formats/torch_dist.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "converter/families/megatron_links.h"
#include "converter/open/formats.h"
#include "converter/stored/sidecar.h"
#include "converter/stored/verl_lora.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {

Stored read_torch_dist(const Location& location, const OpenOptions& options) {
  const auto checkpoint = distckpt::read_torch_dist(location.folder);
  distckpt::check_objects(checkpoint);
  Stored stored{.megatron_names = true,
                .common = distckpt::read_common_state(checkpoint),
                .common_is_apart = true};
  stored.hf = find_hf_form(location, options);
  const auto derived = derived_path(location.folder);
  if (options.hf_config.empty() && distckpt::source_exists(derived))
    stored.derived = distckpt::read_safetensors_header(derived);
  std::vector<const distckpt::TorchDistTensor*> model;
  for (const auto& tensor : checkpoint.tensors) {
    if (is_training_state(tensor.key)) {
      stored.training_state.push_back(tensor.key);
    } else {
      model.push_back(&tensor);
    }
  }
  if (!model.empty() && std::ranges::all_of(model, is_adapter_key, &distckpt::TorchDistTensor::key))
    refuse_adapter(location, /*alone=*/true);
  auto resolved = distckpt::resolve_layout(checkpoint, model);
  stored.layout = std::move(resolved.layout);
  stored.checksums = std::move(resolved.checksums);
  for (const auto& object : checkpoint.objects) {
    if (is_training_state(object.key)) stored.training_state.push_back(object.key);
    stored.objects.push_back(object.key);
  }
  return stored;
}

}  // namespace ferry::converter
