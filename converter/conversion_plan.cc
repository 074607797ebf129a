#include "converter/conversion_plan.h"

#include <string_view>
#include <utility>
#include <variant>

#include "converter/option_check.h"
#include "converter/write/archive_target.h"
#include "converter/write/hf_target.h"
#include "converter/write/megatron_target.h"
#include "converter/write/quantize_checkpoint.h"
#include "converter/write/target_folder.h"
#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/storage/remote_store.h"
#include "distckpt/storage/source_tree.h"
#include "distckpt/storage/work_folder.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::CopyPlan;
using distckpt::Digest;
using distckpt::ModelTensor;
using distckpt::Role;

// The files of a layout and their sizes, of an archive's the decoded ones.
std::vector<std::pair<fs::path, std::int64_t>> files_of(const distckpt::Layout& layout) {
  std::vector<std::pair<fs::path, std::int64_t>> files;
  for (const auto& storage : layout.storages()) {
    const auto* named = distckpt::file_of(storage);
    if (named == nullptr) continue;
    const auto& path = *named;
    const auto* file = std::get_if<distckpt::FileStorage>(&storage);
    const auto bytes =
        file != nullptr ? file->size : std::get<distckpt::ChunkStorage>(storage).decoded_size;
    if (file == nullptr && !files.empty() && files.back().first == path) {
      files.back().second += bytes;
    } else {
      files.emplace_back(path, bytes);
    }
  }
  return files;
}

// A digest of everything that opening a checkpoint tells: its files as they are, where each tensor
// lies, and the files that travel along. Equal for two that were opened from the same files.
Digest summary(const Checkpoint& checkpoint) {
  distckpt::RunningDigest digest;
  const auto add = [&](std::string_view text) { digest.add(distckpt::as_bytes(text)); };
  for (const auto& [path, file] : checkpoint.files->files()) {
    add(fmt::format("{} {} {} {} {} {}\n", path.string(), file.device, file.inode, file.size,
                    file.modified_ns, file.changed_ns));
  }
  for (const auto& tensor : checkpoint.layout.tensors()) {
    add(fmt::format("{} {} {}\n", tensor.name, short_name(tensor.dtype), to_string(tensor.shape)));
    for (const auto& [box, at] : tensor.shards) {
      add(fmt::format("{} {} {} {}\n", to_string(box), at.storage, at.offset,
                      to_string(at.strides)));
    }
  }
  for (const auto& [range, crc, _] : checkpoint.checksums)
    add(fmt::format("{} {} {} {}\n", range.storage, range.offset, range.size, crc));
  for (const auto& key : checkpoint.training_state) add(key + "\n");
  if (const auto& hf = checkpoint.hf) {
    add(hf->index_text.value_or(""));
    for (const auto& header : hf->headers) add(header.filename + header.prefix);
    for (const auto& name : hf->carried) add(name + "\n");
    for (const auto& [name, content] : hf->contents) add(name + content);
  }
  return digest.digest();
}

OpenOptions source_options(const ConvertOptions& options) {
  return {.iteration = lacks_iterations(options.from) ? std::nullopt : options.iteration,
          .hf_config = options.hf_config,
          .keep_quantized = options.keep_quantized,
          .training_state = options.format == Format::kTorchDist && !options.no_save_optim &&
                            options.amendment == nullptr && options.selection.is_all() &&
                            options.mtp != PredictionLayers::kDrop,
          .links = options.follow_symlinks ? Links::kAll : Links::kInside,
          .mtp = options.mtp,
          .without_adapter = true};
}

void choose_target(const ConvertOptions& options, OpenedConversion& opened) {
  const auto& location = opened.source.location;
  const bool to_hf = opened.source.megatron_names || location.format == Format::kArchive;
  opened.format = options.format.value_or(to_hf ? Format::kHuggingFace : Format::kTorchDist);
  if (const auto& family = *opened.source.map.family; family.passes_through) {
    if (opened.format == Format::kTorchDist) {
      require_megatron_form(opened.source,
                            "they are converted to Hugging Face folders (--to hf) and archives "
                            "(--to h5)");
    }
    if (options.quantize)
      require_megatron_form(opened.source, "--quantize carries their weights as they are");
  }
  opened.iteration = location.iteration.value_or(options.iteration.value_or(distckpt::Iteration{}));
  opened.target = resolve_target(options.to);
  if (opened.format == Format::kTorchDist)
    opened.target /= distckpt::iteration_folder(opened.iteration);
}

void select_part(const Selection& selection, Checkpoint& source) {
  if (selection.is_all()) return;
  selection.require_matches(source.tensors);
  require(source.hf.has_value(), ErrorKind::kUsage,
          "{}: a part of it needs a place to say so: name the folder of config.json with "
          "--hf-config",
          source.location.folder.string());
  restrict_checkpoint(source, selection);
}

// An interrupted run may have published and lacked only its last steps, or have lacked none.
bool is_published(const ConvertOptions& options, const fs::path& target) {
  return options.resume && !distckpt::is_remote(target) &&
         (distckpt::WorkFolder::published_earlier(target) ||
          (is_checkpoint(target) && !options.overwrite &&
           !fs::exists(distckpt::work_folder(target) / distckpt::kJournal)));
}

// The source's tensors with the dtypes that they shall have. A tensor that Megatron keeps in fp32
// (a router's bias) stays as it is, and so do those that no cast may touch (A_log).
std::vector<ModelTensor> with_dtypes(const Checkpoint& source,
                                     std::optional<distckpt::DType> dtype) {
  auto tensors = source.tensors;
  if (!dtype) return tensors;
  std::set<const ModelTensor*> kept;
  for (const auto& tensor : source.map.megatron) {
    if (tensor.fp32 || tensor.row->keeps_dtype) kept.insert(&tensors[tensor.parts.front().model]);
  }
  for (auto& tensor : tensors) {
    if (kept.contains(&tensor)) continue;
    if (tensor.role != Role::kWeight || !distckpt::is_floating_point(tensor.dtype)) continue;
    require(distckpt::can_cast(tensor.dtype, *dtype), ErrorKind::kLayout,
            "{}: {} cannot be cast to {}", tensor.name, short_name(tensor.dtype),
            short_name(*dtype));
    tensor.dtype = *dtype;
  }
  return tensors;
}

std::unique_ptr<Target> make_target(const OpenedConversion& opened,
                                    const ConvertOptions& options,
                                    const fs::path& folder) {
  switch (opened.format) {
    case Format::kArchive:
      return make_archive_target(opened.source, opened.tensors, options.dtype,
                                 options.max_shard_size, folder);
    case Format::kHuggingFace:
      return make_hf_target(opened.source, opened.tensors, options.dtype, options.max_shard_size,
                            folder);
    default:
      return make_megatron_target(
          opened.source, opened.tensors,
          {.parallel = options.parallel,
           .layout = written_layout(*opened.source.map.family, options.megatron_layout.value_or(
                                                                   opened.source.megatron_layout)),
           .iteration = opened.iteration,
           .dtype = options.dtype},
          folder);
  }
}

// The rule by which elements of another dtype than the one asked for are read.
distckpt::Transform cast_rule(const ConvertOptions& options) {
  return options.dtype ? distckpt::Transform::kCast : distckpt::Transform::kCastExact;
}

CopyPlan plan_copies(const OpenedConversion& opened,
                     const PlannedConversion& planned,
                     distckpt::TensorMap& links,
                     distckpt::Transform cast) {
  try {
    return distckpt::plan_copy(planned.tensors, {.layout = &opened.source.layout, .map = &links},
                               planned.target->side(), cast);
  } catch (Error& error) {
    const auto& hf = opened.source.hf;
    if (hf && !hf->part.empty() && opened.format == Format::kTorchDist) {
      error.set_hint(
          "a Megatron-Core tensor is written whole: q with k and v, gate with up, all layers and "
          "experts; take all of it or nothing, or write any part with --to hf");
    }
    throw;
  }
}

}  // namespace

OpenedConversion open_conversion(const ConvertOptions& options) {
  OpenedConversion opened{.source = options.memory != nullptr
                                        ? *options.memory
                                        : open(options.from, source_options(options))};
  auto& source = opened.source;
  source.files->settle();
  opened.source_summary = summary(source);
  check_derived(source);
  choose_target(options, opened);
  require_effective(options, source, opened.format);
  select_part(options.selection, source);
  const bool as_it_was = source.hf && !options.quantize &&
                         keeps_headers(*source.hf, options.dtype, options.max_shard_size);
  if (opened.format == Format::kHuggingFace && !as_it_was) leave_out_derived(source);
  if (options.amendment != nullptr) {
    options.amendment->begin(source);
    opened.amendment = options.amendment->identity();
  }
  opened.published = is_published(options, opened.target);
  if (!opened.published)
    refuse_unsafe_target(opened.target, opened.format, source.location.folder, options.overwrite);
  opened.tensors = with_dtypes(source, options.dtype);
  if (options.quantize)
    quantize_checkpoint(source, opened.tensors, *options.quantize, cast_rule(options));
  require(options.job.size == 1 || opened.format != Format::kArchive, ErrorKind::kUsage,
          "--to h5: an archive is written by one process; --no-ranks works alone");
  if (!distckpt::is_remote(opened.target)) return opened;
  require(options.job.size == 1, ErrorKind::kUsage,
          "{}: S3 is written to by one process; --no-ranks works alone", opened.target.string());
  return opened;
}

void require_same_source(const OpenedConversion& opened, const ConvertOptions& options) {
  with_context(
      [] { return std::string("looking at the source again, before publishing"); },
      [&] {
        const auto& source = opened.source;
        source.files->require_unchanged();
        if (options.memory != nullptr) return;
        require(summary(open(source.location, source_options(options))) == opened.source_summary,
                ErrorKind::kIo, "{}: its headers are not what they were when the conversion began",
                source.location.folder.string());
      });
}

PlannedConversion plan_conversion(const OpenedConversion& opened,
                                  const ConvertOptions& options,
                                  const fs::path& folder) {
  const auto& source = opened.source;
  PlannedConversion planned{.tensors = opened.tensors, .folder = folder};
  planned.target = make_target(opened, options, folder);
  // Padding of the same rows on both sides is carried over; other padding is dropped and reported.
  auto links = source.links;
  planned.shared_padding = planned.target->share_padding(source.layout, links, planned.tensors);
  for (auto& tensor : planned.tensors) {
    if (options.dtype && tensor.role == Role::kPadding && !tensor.name.starts_with(kStatePrefix))
      tensor.dtype = *options.dtype;
  }
  planned.copy = plan_copies(opened, planned, links, cast_rule(options));
  if (options.amendment != nullptr) require_amendable(planned.copy);
  planned.staging = distckpt::staging_budget(
      planned.copy, copying_options(planned, options),
      options.amendment != nullptr ? distckpt::Staged::kAmended : distckpt::Staged::kStretches);
  for (const auto& [path, bytes] : files_of(planned.target->layout()))
    planned.tensor_files.push_back(
        {.name = path.lexically_relative(folder).string(), .bytes = bytes});
  planned.files = planned.target->files(folder);
  const bool replaces = options.job.rank == 0 && !opened.published &&
                        !distckpt::is_remote(opened.target) && fs::exists(opened.target);
  if (replaces && !fs::is_empty(opened.target))
    replaceable_files(opened.target, opened.format, planned.files);
  return planned;
}

void require_amendable(const CopyPlan& plan) {
  const auto is_less = [](const distckpt::Cover& cover) {
    return std::ranges::any_of(cover, [](const distckpt::Piece& piece) { return piece.less != 0; });
  };
  for (const auto& one : plan.tensors) {
    if (!is_less(one.source) && std::ranges::none_of(one.replicas, is_less) &&
        std::ranges::none_of(one.targets, is_less))
      continue;
    throw Error(ErrorKind::kLayout,
                fmt::format("{}: Megatron-Core holds it less one, rounded", one.tensor.name),
                "go through Hugging Face's form: ferry convert --to hf");
  }
}

Digest fingerprint(const OpenedConversion& opened, const PlannedConversion& planned) {
  std::string text = "3\n";
  for (const auto& [path, bytes] : files_of(opened.source.layout)) {
    // Machines that share a file system may number devices and inodes in their own ways.
    const auto& file = opened.source.files->files().at(path);
    text += fmt::format("{} {} {} {}\n", distckpt::canonical_source(path).string(), file.size,
                        file.modified_ns, file.changed_ns);
  }
  for (const auto& one : planned.copy.tensors) {
    text += fmt::format("{} {} {}\n", one.tensor.name, short_name(one.tensor.dtype),
                        to_string(one.tensor.shape));
    for (const auto& cover : one.targets) {
      for (const auto& piece : cover) {
        text += fmt::format("{} {} {}\n", to_string(piece.box), piece.at.storage, piece.at.offset);
      }
    }
  }
  for (const auto& file : planned.tensor_files)
    text += fmt::format("{} {}\n", file.name, file.bytes);
  if (opened.amendment) text += to_string(*opened.amendment) + "\n";
  return distckpt::digest_block(distckpt::as_bytes(text));
}

distckpt::ExecutorOptions copying_options(const PlannedConversion& planned,
                                          const ConvertOptions& options) {
  auto copying = executor_options(options);
  if (options.amendment == nullptr) return copying;
  copying.thread_memory = options.amendment->thread_memory();
  if (!options.amendment->in_order()) return copying;
  copying.in_order = distckpt::InOrder::kSlabbed;
  // The chunks of an archive wait for those of earlier tensors: whole ones would wait in memory.
  const bool waits = !planned.target->knows_file_sizes();
  if (waits && distckpt::buffer_sizes(planned.copy).slabs > 0) copying.threads = 1;
  return copying;
}

distckpt::ExecutorOptions executor_options(const ConvertOptions& options) {
  return {.threads = distckpt::reading_threads(
              distckpt::reading_threads(options.threads, options.from), options.to),
          .max_memory = options.max_memory,
          .on_compared = {}};
}

}  // namespace ferry::converter
