#include "converter/digest_checkpoint.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/remote_store.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

// Every file of the checkpoint, but hidden ones that are not its own (a version control folder, a
// download's lock).
std::vector<fs::path> list_files(const Location& location, const std::vector<fs::path>& leave_out) {
  std::vector<fs::path> files;
  std::set<fs::path> skip;
  for (const auto& path : leave_out) {
    if (!path.empty()) skip.insert(fs::weakly_canonical(path));
  }
  const auto tracker = location.root / distckpt::kTracker;
  if (location.folder != location.root && distckpt::source_exists(tracker))
    files.push_back(tracker);
  if (distckpt::is_remote(location.folder)) {
    for (const auto& path : distckpt::list_source_below(location.folder)) {
      const auto below = path.lexically_relative(location.folder);
      const auto hidden = [](const fs::path& name) {
        return name.string().starts_with('.') && name != distckpt::kTorchDistMetadata;
      };
      if (std::ranges::none_of(below, hidden)) files.push_back(path);
    }
    std::ranges::sort(files);
    distckpt::open_sources(files);
    return files;
  }
  for (auto at = fs::recursive_directory_iterator(location.folder); at != fs::end(at); ++at) {
    const auto name = at->path().filename().string();
    if (at->is_directory() && name.starts_with('.')) {
      at.disable_recursion_pending();
      continue;
    }
    const bool hidden = name.starts_with('.') && name != distckpt::kTorchDistMetadata;
    if (at->is_regular_file() && !hidden && !skip.contains(fs::weakly_canonical(at->path())))
      files.push_back(at->path());
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

std::string model_digest(const std::vector<distckpt::ModelTensor>& tensors,
                         const std::vector<distckpt::Digest>& digests) {
  std::vector<distckpt::NamedDigest> named;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].role == distckpt::Role::kWeight)
      named.push_back({.name = tensors[i].name, .digest = digests[i]});
  }
  return to_string(distckpt::digest_model(std::move(named)));
}

Manifest manifest_of(const Checkpoint& checkpoint, const std::vector<distckpt::Digest>& digests) {
  Manifest manifest{.format = std::string(to_string(checkpoint.location.format)),
                    .model_digest = model_digest(checkpoint.tensors, digests),
                    .part = checkpoint.hf ? checkpoint.hf->part : Part(),
                    .tensors = {},
                    .files = {}};
  for (std::size_t i = 0; i < checkpoint.tensors.size(); ++i) {
    const auto& tensor = checkpoint.tensors[i];
    if (tensor.role != distckpt::Role::kWeight && tensor.role != distckpt::Role::kDerived) continue;
    manifest.tensors.push_back({.name = tensor.name,
                                .dtype = tensor.dtype,
                                .shape = tensor.shape,
                                .role = tensor.role,
                                .digest = digests[i]});
  }
  return manifest;
}

Manifest digest_checkpoint(const DigestOptions& options, const ProgressFunction& progress) {
  const OpenOptions how{.iteration = options.iteration,
                        .hf_config = options.hf_config,
                        .keep_quantized = options.keep_quantized,
                        .without_adapter = true};
  auto checkpoint = open(options.path, how);
  check_derived(checkpoint);
  // A part of itself is itself.
  const bool restricts =
      !options.part.empty() && (!checkpoint.hf || checkpoint.hf->part != options.part);
  if (restricts) {
    for (const auto& selection : options.part) restrict_checkpoint(checkpoint, selection);
  }
  const distckpt::Executor executor(
      {.threads = distckpt::reading_threads(options.threads, options.path),
       .max_memory = options.max_memory,
       .on_compared = {}});

  const auto plan = distckpt::plan_read(checkpoint.tensors, checkpoint.side());
  const auto source = checkpoint.source();
  const auto tensors =
      wait_reporting(executor.submit(plan, *source, nullptr), "digesting", progress);
  source->verify_checksums();
  auto manifest = manifest_of(checkpoint, tensors.digests);
  if (restricts) manifest.part = options.part;
  if (!options.files || restricts) return manifest;

  // A file is digested as a tensor of bytes is.
  std::vector<distckpt::ModelTensor> files;
  distckpt::Layout layout;
  distckpt::TensorMap links;
  for (const auto& path : list_files(checkpoint.location, options.leave_out)) {
    const auto index = static_cast<std::uint32_t>(files.size());
    const auto name = path.lexically_relative(checkpoint.location.root).string();
    const auto size = distckpt::ReadFile(path).size();
    const distckpt::Shape shape{size};
    const auto storage = layout.add_storage(distckpt::FileStorage{.path = path, .size = size});
    files.push_back({.name = name, .dtype = distckpt::DType::kU8, .shape = shape});
    layout.add_tensor({.name = name,
                       .dtype = distckpt::DType::kU8,
                       .shape = shape,
                       .shards = {distckpt::packed_shard(distckpt::Box::whole(shape),
                                                         distckpt::DType::kU8, storage, 0)}});
    links.links.push_back(distckpt::BoxLink::whole(index, index, shape));
  }
  const auto file_plan = distckpt::plan_read(files, {.layout = &layout, .map = &links});
  distckpt::FileSource file_source(layout.storages());
  const auto digests =
      wait_reporting(executor.submit(file_plan, file_source, nullptr), "digesting files", progress);
  file_source.verify_checksums();
  for (std::size_t i = 0; i < files.size(); ++i) {
    manifest.files.push_back(
        {.path = files[i].name, .size = files[i].shape[0], .digest = digests.digests[i]});
  }
  return manifest;
}

ManifestCheck check_manifest(DigestOptions options,
                             const Manifest& expected,
                             bool all_files,
                             const ProgressFunction& progress) {
  const bool files = options.files;
  const bool same_format =
      expected.format == to_string(locate(options.path, options.iteration).format);
  options.part = expected.part;
  options.files = files && (same_format || all_files);
  ManifestCheck check{.found = digest_checkpoint(options, progress)};
  // A whole model that is held against the manifest of a part has no files to compare.
  check.files_compared = files && same_format && !check.found.files.empty();
  check.differences = compare_manifests(expected, check.found, check.files_compared);
  return check;
}

}  // namespace ferry::converter
