#include "converter/inspect.h"

#include "converter/hf_config.h"
#include "converter/megatron_args.h"
#include "converter/megatron_links.h"
#include "converter/sidecar.h"
#include "distckpt/error.h"
#include "distckpt/torch_dist.h"

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
  const auto form = read_hf_folder(report.location.folder);
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

std::optional<distckpt::ParallelConfig> read_layout(distckpt::PickleValue common) {
  const auto args = common.find("args");
  if (!args || !args->is_object("argparse.Namespace")) return std::nullopt;
  const auto state = args->object_state();
  const auto integer = [&](std::string_view key) {
    const auto value = state.find(key);
    return value && value->kind() == distckpt::PickleKind::kInt ? static_cast<int>(value->as_int())
                                                                : 1;
  };
  return distckpt::ParallelConfig{
      .tensor_model_parallel_size = integer("tensor_model_parallel_size"),
      .pipeline_model_parallel_size = integer("pipeline_model_parallel_size"),
      .expert_model_parallel_size = integer("expert_model_parallel_size"),
      .make_vocab_size_divisible_by = integer("make_vocab_size_divisible_by")};
}

void inspect_torch_dist(InspectReport& report, const fs::path& hf_config) {
  const auto checkpoint = distckpt::read_torch_dist(report.location.folder);
  try_config(report, [&]() -> std::optional<distckpt::TransformerConfig> {
    auto form =
        hf_config.empty() ? read_sidecar(report.location.folder) : read_hf_config(hf_config);
    report.has_sidecar = form && hf_config.empty();
    const auto common = distckpt::read_common_state(checkpoint);
    if (common) {
      report.saved_with = read_layout(distckpt::common_dict(*common));
    }
    if (form) return parse_hf_config(form->config_text(), form->config_source());
    auto config = common ? read_args(distckpt::common_dict(*common)) : std::nullopt;
    if (!config)
      report.config_problem =
          "neither a sidecar nor arguments say it; name a folder with --hf-config";
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
    add(report, std::move(inspected));
  }
  for (const auto& object : checkpoint.objects) {
    report.objects.push_back(object.key);
    if (is_training_state(object.key)) ++report.num_training_state;
  }
}

}  // namespace

InspectReport inspect(const fs::path& path,
                      std::optional<distckpt::Iteration> iteration,
                      const fs::path& hf_config) {
  InspectReport report{.location = locate(path, iteration)};
  if (report.location.format == Format::kHuggingFace) {
    refuse_hf_config(path, hf_config);
    inspect_hf(report);
  } else {
    inspect_torch_dist(report, hf_config);
  }
  report.num_parameters = report.num_stored;
  if (report.config && report.config->vocab_size > 0) {
    report.num_parameters = 0;
    for (const auto& tensor : make_model_map(*report.config).tensors)
      report.num_parameters += tensor.shape.product();
  }
  return report;
}

}  // namespace ferry::converter
