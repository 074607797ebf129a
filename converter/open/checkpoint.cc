#include "converter/open/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "converter/families/families.h"
#include "converter/families/hf_config.h"
#include "converter/families/quantization.h"
#include "converter/open/formats.h"
#include "converter/open/hf_opener.h"
#include "converter/open/megatron_opener.h"
#include "converter/open/prediction_layers.h"
#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/remote_store.h"
#include "distckpt/storage/remote_tree.h"
#include "distckpt/storage/source_files.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;

using distckpt::DType;
namespace {

// The file that describes the tensors, for errors that name a tensor and no file.
fs::path description_of(const Location& location) {
  switch (location.format) {
    case Format::kTorchDist:
    case Format::kDcp:
      return location.folder / distckpt::kTorchDistMetadata;
    case Format::kZarr:
      return location.folder / "*" / ".zarray";
    default:
      return location.folder;
  }
}

using Rename = std::function<std::string(const std::string&)>;

void rename_tensors(const Rename& rename, Stored& stored) {
  const auto stays = [&](const distckpt::TensorLayout& tensor) {
    return rename(tensor.name) == tensor.name;
  };
  if (std::ranges::all_of(stored.layout.tensors(), stays)) return;
  distckpt::Layout named;
  for (const auto& storage : stored.layout.storages()) named.add_storage(storage);
  for (auto tensor : stored.layout.tensors()) {
    tensor.name = rename(tensor.name);
    named.add_tensor(std::move(tensor));
  }
  for (auto& replica : stored.replicas) replica.of = rename(replica.of);
  stored.layout = std::move(named);
}

// Tensors of a model without its head get the names that the whole model's have, as transformers
// loads them into it. Files that are made of them have those.
void add_base_model_prefix(const Family& family, Stored& stored) {
  bool added = false;
  const auto full_name = [&](const std::string& name) {
    auto full = name_with_prefix(family, name);
    if (!full || stored.layout.find(*full)) return name;
    added = true;
    return *std::move(full);
  };
  rename_tensors(full_name, stored);
  auto& hf = *stored.hf;
  for (auto& name : hf.absent) name = full_name(name);
  if (!added) return;
  hf.headers.clear();
  hf.index_text.reset();
}

// Tensors that are named as transformers' modules are, by state_dict(), get the names that files of
// the hub have. Headers that are kept go into files as they are.
void use_file_names(const Family& family, Stored& stored) {
  if (family.names->modules.empty()) return;
  const auto rename = [&](const std::string& name) { return file_name(family, name); };
  if (!stored.megatron_names) rename_tensors(rename, stored);
  auto& hf = *stored.hf;
  for (auto& name : hf.absent) name = rename(name);
  for (auto& header : hf.headers) {
    for (auto& entry : header.entries) entry.name = rename(entry.name);
  }
  const auto rename_keys = [&](auto& known) {
    for (const auto& [name, value] : std::exchange(known, {})) known.emplace(rename(name), value);
  };
  rename_keys(hf.dtypes);
  rename_keys(hf.shapes);
}

}  // namespace

void refuse_hf_config(const Location& location, const fs::path& hf_config) {
  require(hf_config.empty() || !location.has_own_config(), ErrorKind::kUsage,
          "{}: is {}, which has its own config.json: --hf-config is for Megatron checkpoints",
          location.root.string(),
          location.format == Format::kArchive ? "an archive" : "a Hugging Face checkpoint");
}

Checkpoint open(const fs::path& path, const OpenOptions& options) {
  const auto location = locate(path, options.iteration);
  refuse_hf_config(location, options.hf_config);
  return open(location, options);
}

Checkpoint open(const Location& location, const OpenOptions& options) {
  const auto files = std::make_shared<distckpt::SourceFiles>();
  const distckpt::NotedFiles noted(*files);
  try {
    auto stored = read_stored(location, options);
    if (stored.hf) {
      const auto& hf = *stored.hf;
      const auto& family = family_of(parse_hf_config(hf.config_text(), hf.config_source()).family);
      if (!stored.megatron_names) add_base_model_prefix(family, stored);
      use_file_names(family, stored);
    }
    apply_prediction_policy(options.mtp, location, stored);
    auto checkpoint = stored.megatron_names
                          ? open_megatron(location, std::move(stored))
                          : open_huggingface(location, std::move(stored), options);
    if (options.training_state && location.format == Format::kTorchDist) {
      require(checkpoint.megatron_layout == MegatronLayout::kLanguageModel ||
                  checkpoint.training_state.empty(),
              ErrorKind::kUsage,
              "{}: optimizer and RNG of a model {} are not converted: leave them behind with "
              "--no-save-optim",
              location.folder.string(),
              keeps_tower(checkpoint.megatron_layout) ? "that also sees" : "in slime's layout");
      add_training_state(checkpoint);
    }
    checkpoint.files = files;
    if (checkpoint.hf) checkpoint.hf->files = files;
    return checkpoint;
  } catch (Error& error) {
    if (error.report().find(location.folder.string()) == std::string::npos)
      error.add_context(fmt::format("reading {}", description_of(location).string()));
    throw;
  }
}

Checkpoint open_file(const fs::path& file) {
  distckpt::refuse_mistaken_path(file);
  distckpt::SourceFiles files;
  const distckpt::NotedFiles noted(files);  // which refuses pointers of git-lfs
  if (distckpt::is_remote(file)) distckpt::RemoteTree::instance().add_root(file);
  const auto folder = file.parent_path();
  Checkpoint checkpoint{.location = {.root = file, .folder = folder}};
  checkpoint.map.family = &family_of("");
  auto header = distckpt::read_safetensors_header(file);
  distckpt::add_to_layout(header, folder, checkpoint.layout);
  for (const auto& stored : checkpoint.layout.tensors()) {
    const auto index = static_cast<std::uint32_t>(checkpoint.tensors.size());
    checkpoint.tensors.push_back(
        {.name = stored.name, .dtype = stored.dtype, .shape = stored.shape});
    checkpoint.links.links.push_back(distckpt::BoxLink::whole(index, index, stored.shape));
  }
  checkpoint.map.tensors = checkpoint.tensors;
  checkpoint.hf.emplace().headers.push_back(std::move(header));
  return checkpoint;
}

std::optional<Quantization> stored_quantization(const fs::path& path) {
  if (!lacks_iterations(path)) return {};
  const auto location = locate(path);
  if (!location.has_own_config()) return {};
  std::optional<HfForm> form;
  if (location.format == Format::kArchive) {
    form = read_archive(location).hf;
  } else {
    if (!distckpt::source_exists(location.folder / distckpt::kHfConfig)) return {};
    form.emplace().folder = location.folder;
  }
  return parse_quantization(form->config_text(), form->config_source());
}

std::unique_ptr<distckpt::FileSource> Checkpoint::source(distckpt::ReadMode mode) const {
  return std::make_unique<distckpt::FileSource>(layout.storages(), checksums, mode, files);
}

std::string family_by_arguments(const Checkpoint& checkpoint, std::string_view option) {
  if (checkpoint.hf || checkpoint.map.config.family.empty()) return "";
  return fmt::format("{}, by Megatron's arguments; {} names another", checkpoint.map.config.family,
                     option);
}

void require_hf_form(const Checkpoint& checkpoint) {
  if (checkpoint.hf) return;
  throw Error(
      ErrorKind::kUsage,
      fmt::format("{}: holds no config.json for Hugging Face", checkpoint.location.folder.string()),
      "name a folder that holds config.json and the tokenizer with --hf-config");
}

void require_megatron_form(const Checkpoint& checkpoint, std::string_view instead) {
  const auto& family = *checkpoint.map.family;
  if (!family.passes_through) return;
  const auto config =
      checkpoint.hf ? checkpoint.hf->config_source() : checkpoint.location.folder.string();
  with_context([&] { return fmt::format("reading {}", config); },
               [&] { find_family(checkpoint.map.config.family); });
  fail(ErrorKind::kLayout, "models of the family {} have no Megatron form here: {}",
       family.model_type, instead);
}

void leave_out_derived(Checkpoint& checkpoint) {
  std::vector<std::optional<std::uint32_t>> at;
  std::vector<distckpt::ModelTensor> kept;
  for (auto& tensor : checkpoint.tensors) {
    at.emplace_back();
    if (tensor.role == distckpt::Role::kDerived) continue;
    at.back() = static_cast<std::uint32_t>(kept.size());
    kept.push_back(std::move(tensor));
  }
  checkpoint.tensors = std::move(kept);
  distckpt::restrict_links(checkpoint.links, checkpoint.layout, at);
}

void restrict_checkpoint(Checkpoint& checkpoint, const Selection& selection) {
  restrict_map(checkpoint.map, {selection});
  const auto at = keep_selected(checkpoint.tensors, {selection});
  distckpt::restrict_links(checkpoint.links, checkpoint.layout, at);
  if (!checkpoint.hf) return;
  auto& hf = *checkpoint.hf;
  // A part may lack one of the ends, which say that they are two where config.json does not.
  if (checkpoint.map.config.untie_embeddings_and_output_weights && checkpoint.map.family->tied &&
      !says_whether_tied(hf.config_text(), hf.config_source()))
    hf.untie_ends();
  hf.part.push_back(selection);
  checkpoint.hf->headers.clear();
  checkpoint.hf->index_text.reset();
}

void check_derived(const Checkpoint& checkpoint) {
  const auto& config = checkpoint.map.config;
  std::unique_ptr<distckpt::FileSource> source;
  for (const auto& link : checkpoint.links.links) {
    const auto& tensor = checkpoint.tensors[link.model];
    if (tensor.role != distckpt::Role::kDerived) continue;
    if (!source) source = checkpoint.source();
    const auto& shard = checkpoint.layout.tensor(link.stored).shards.front();
    std::vector<std::byte> found(static_cast<std::size_t>(tensor.num_bytes()));
    std::vector<distckpt::ChecksumPart> parts;
    source->read({.at = shard.at, .size = tensor.shape, .element_size = size_of(tensor.dtype)},
                 found, parts);
    for (std::int64_t i = 0; i < tensor.shape[0]; ++i) {
      // transformers, modeling_rope_utils: 1 / base ** (2i / dim); the last bits are the power
      // function's.
      const double expected =
          std::pow(config.rotary_base,
                   -2.0 * static_cast<double>(i) / static_cast<double>(config.kv_channels));
      std::vector<std::byte> element(static_cast<std::size_t>(size_of(tensor.dtype)));
      distckpt::cast(DType::kF64, std::as_bytes(std::span(&expected, 1)), tensor.dtype, element,
                     distckpt::CastRule::kRound);
      const auto* const there = found.data() + i * size_of(tensor.dtype);
      const auto ulps = distckpt::ulp_distance(tensor.dtype, element.data(), there);
      require(ulps && *ulps <= 4, ErrorKind::kCorrupt,
              "{}: element {} is {}, but rope_theta {} gives {}", tensor.name, i,
              distckpt::element_value(tensor.dtype, there), config.rotary_base, expected);
    }
  }
}

}  // namespace ferry::converter
