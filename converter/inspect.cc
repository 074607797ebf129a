#include "converter/inspect.h"

#include <optional>
#include <utility>

#include "converter/families/hf_config.h"
#include "converter/families/megatron_args.h"
#include "converter/families/megatron_links.h"
#include "converter/open/formats.h"
#include "converter/open/megatron_opener.h"
#include "converter/stored/verl_lora.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/storage/source_files.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

void add(InspectReport& report, InspectedTensor tensor) {
  const auto elements = tensor.shape.product();
  if (is_training_state(tensor.name)) {
    ++report.num_training_state;
  } else {
    report.num_stored += elements;
    report.num_bytes += elements * size_of(tensor.dtype);
    report.elements_by_dtype[std::string(short_name(tensor.dtype))] += elements;
  }
  for (const auto& chunk : tensor.chunks) ++report.chunks_by_file[chunk.file];
  report.tensors.push_back(std::move(tensor));
}

// A configuration that is missing or not understood is no reason not to show the rest.
template <typename Read>
void try_config(InspectReport& report, Read&& read) {
  try {
    report.config = read();
  } catch (const Error& error) {
    report.config_problem = error.what();
  }
}

void inspect_hf(InspectReport& report) {
  const auto form = read_hf_folder(report.location.folder, Links::kAll);
  report.part = form.part;
  try_config(report, [&] { return parse_hf_config(form.config_text(), form.config_source()); });
  for (const auto& header : form.headers) {
    for (const auto& entry : header.entries) {
      add(report, {.name = entry.name,
                   .dtype = entry.dtype,
                   .shape = entry.shape,
                   .chunks = {{.file = header.filename,
                               .offset = entry.begin,
                               .length = entry.end - entry.begin,
                               .box = distckpt::Box::whole(entry.shape)}}});
    }
  }
}

void inspect_torch_dist(InspectReport& report, const fs::path& hf_config) {
  const auto checkpoint = distckpt::read_torch_dist(report.location.folder);
  try_config(report, [&]() -> std::optional<models::TransformerConfig> {
    const auto form = find_hf_form(report.location, {.hf_config = hf_config});
    report.has_sidecar = form && hf_config.empty() && report.location.hf.empty();
    if (form) report.part = form->part;
    const auto common = distckpt::read_common_state(checkpoint);
    if (common) {
      report.saved_with = read_parallel_args(distckpt::common_dict(*common));
    }
    if (form) return parse_hf_config(form->config_text(), form->config_source());
    auto config = common ? read_args(distckpt::common_dict(*common)) : std::nullopt;
    if (config) {
      TensorOutline outline;
      for (const auto& tensor : checkpoint.tensors) {
        if (!is_training_state(tensor.key)) outline.emplace_back(tensor.key, tensor.shape);
      }
      read_from_tensors(outline, *config);
    } else {
      report.config_problem =
          "neither a sidecar nor arguments say it; name a folder with --hf-config";
    }
    return config;
  });
  for (const auto& tensor : checkpoint.tensors) {
    InspectedTensor inspected{
        .name = tensor.key, .dtype = tensor.dtype, .shape = tensor.shape, .chunks = {}};
    for (const auto& chunk : tensor.chunks) {
      inspected.chunks.push_back(
          {.file = checkpoint.files[chunk.item.file].path.filename().string(),
           .offset = chunk.item.offset,
           .length = chunk.item.length,
           .box = chunk.box});
    }
    if (is_adapter_key(tensor.key) && !is_training_state(tensor.key)) ++report.num_adapter_tensors;
    add(report, std::move(inspected));
  }
  for (const auto& object : checkpoint.objects) {
    report.objects.push_back(object.key);
    if (is_training_state(object.key)) ++report.num_training_state;
  }
}

// Formats whose readers tell all that there is: boxes of tensors in files.
void inspect_stored(InspectReport& report, const OpenOptions& options) {
  auto stored = read_stored(report.location, options);
  if (stored.common) {
    const auto common = distckpt::common_dict(*stored.common);
    report.saved_with = read_parallel_args(common);
    if (!stored.hf) try_config(report, [&] { return read_args(common); });
  }
  if (stored.hf) {
    try_config(report, [&] {
      return parse_hf_config(stored.hf->config_text(), stored.hf->config_source());
    });
  }
  report.num_training_state = static_cast<std::int64_t>(stored.training_state.size());
  report.num_adapter_tensors = stored.num_adapter_tensors;
  report.objects = std::move(stored.objects);
  // Slices come together by the model that they are of.
  const auto layout = stored.assemble ? open_megatron(report.location, std::move(stored)).layout
                                      : std::move(stored.layout);
  for (const auto& tensor : layout.tensors()) {
    InspectedTensor inspected{
        .name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape, .chunks = {}};
    for (const auto& shard : tensor.shards) {
      const auto& storage = layout.storages()[shard.at.storage];
      const auto* encoded = std::get_if<distckpt::ChunkStorage>(&storage);
      inspected.chunks.push_back(
          {.file = distckpt::file_of(storage)->lexically_relative(report.location.folder).string(),
           .offset = encoded != nullptr ? encoded->offset : shard.at.offset,
           .length = encoded != nullptr ? encoded->encoded_size
                                        : shard.box.size.product() * size_of(tensor.dtype),
           .box = shard.box});
    }
    add(report, std::move(inspected));
  }
}

}  // namespace

InspectReport inspect(const fs::path& path,
                      std::optional<distckpt::Iteration> iteration,
                      const fs::path& hf_config) {
  distckpt::SourceFiles files;
  const distckpt::NotedFiles noted(files);  // which refuses pointers of git-lfs
  InspectReport report{.location = locate(path, iteration)};
  refuse_hf_config(report.location, hf_config);
  if (!hf_config.empty()) (void)read_hf_companions(hf_config, OpenOptions{}.links);  // it is there
  if (report.location.format == Format::kHuggingFace) {
    inspect_hf(report);
  } else if (report.location.format == Format::kTorchDist) {
    inspect_torch_dist(report, hf_config);
  } else {
    inspect_stored(report,
                   {.iteration = iteration, .hf_config = hf_config, .without_adapter = true});
  }
  if (!report.config) return report;
  const auto& config = *report.config;
  report.only_sizes = family_of(config.family).passes_through;
  if (report.only_sizes) return report;
  const bool no_sizes = config.multi_latent_attention && config.kv_lora_rank == 0;
  if (config.vocab_size == 0 || no_sizes) return report;
  if (report.part.empty()) {
    report.num_parameters = count_parameters(config);
    return report;
  }
  std::int64_t num_parameters = 0;
  for (const auto& tensor : make_part_map(config, report.part).tensors)
    num_parameters += tensor.shape.product();
  report.num_parameters = num_parameters;
  return report;
}

}  // namespace ferry::converter
