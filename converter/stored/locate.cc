#include "converter/stored/locate.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "converter/stored/hf_folder.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/formats/zarr.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/remote_store.h"
#include "distckpt/storage/remote_tree.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::Iteration;

constexpr std::string_view kShardSuffix = ".distcp";

struct FormatNames {
  std::string_view name{};
  std::string_view words{};
};
constexpr FormatNames kFormatNames[] = {{"huggingface", "Hugging Face"},
                                        {"torch_save", "Hugging Face, torch.save"},
                                        {"torch_dist", "Megatron-Core torch_dist"},
                                        {"megatron_legacy", "Megatron legacy"},
                                        {"torch_dcp", "torch.distributed.checkpoint"},
                                        {"zarr", "Megatron-Core zarr"},
                                        {"fsdp", "FSDP by rank"},
                                        {"archive", "Ferry archive"}};
static_assert(std::size(kFormatNames) == static_cast<std::size_t>(Format::kArchive) + 1);

// Folders that other commands take.
struct OtherFolder {
  std::string_view file{};
  std::string_view words{};
  std::string_view hint{};
};
constexpr OtherFolder kOtherFolders[] = {
    {"adapter_config.json", "is a LoRA adapter, and no checkpoint", kAdapterHint},
    {"ferry-delta.json", "is a delta, and no checkpoint",
     "ferry delta inspect shows it, ferry delta apply BASE DELTA DST applies it"}};

void require_no_other_folder(const fs::path& path) {
  if (distckpt::source_exists(path / distckpt::kHfConfig)) return;
  for (const auto& other : kOtherFolders) {
    if (!distckpt::source_exists(path / other.file)) continue;
    throw Error(ErrorKind::kUsage, fmt::format("{}: {}", path.string(), other.words),
                std::string(other.hint));
  }
}

// "Qwen/Qwen3-8B" may be meant for a model of the hub.
std::string hint_for_missing(const fs::path& path) {
  const auto name = path.string();
  const bool is_repo = std::ranges::count(name, '/') == 1 && name.front() != '/' &&
                       name.front() != '.' && !name.ends_with('/');
  return is_repo ? fmt::format("a model of the Hugging Face hub is hf://{}", name) : "";
}

template <typename Matches>
bool holds(const fs::path& folder, Matches&& matches) {
  return std::ranges::any_of(distckpt::list_source(folder), matches);
}

// One of the files of an archive.
bool is_archive_file(const fs::path& path) {
  return distckpt::source_is_file(path) &&
         distckpt::shard_store_file_count(path.filename().string()).has_value();
}

fs::path folder_of_file(const fs::path& path) {
  return distckpt::is_remote(path) ? path.parent_path() : fs::absolute(path).parent_path();
}

// The format of an iteration's folder, or of a folder that is like one.
std::optional<Format> format_of_iteration(const fs::path& folder) {
  // Without .metadata that one is missed when it is read.
  const bool has_shards =
      holds(folder, [](const fs::path& path) { return path.extension() == kShardSuffix; });
  if (distckpt::is_torch_dist(folder) || has_shards) {
    return distckpt::source_exists(folder / distckpt::kTorchDistConfig) ? Format::kTorchDist
                                                                        : Format::kDcp;
  }
  const bool zarr =
      distckpt::source_exists(folder / distckpt::kTorchDistConfig) &&
      holds(folder, [](const fs::path& path) { return distckpt::is_zarr_array(path); });
  if (zarr) return Format::kZarr;
  const bool legacy = holds(folder, [](const fs::path& path) {
    return distckpt::parse_rank_folder(path.filename().string()).has_value();
  });
  return legacy ? std::optional(Format::kLegacy) : std::nullopt;
}

bool has_safetensors(const fs::path& folder) {
  return holds(folder, [](const fs::path& path) {
    return path.extension() == distckpt::kSafetensorsSuffix;
  });
}

std::optional<Format> format_without_iterations(const fs::path& folder) {
  if (const auto loaded = loaded_weights(folder); !loaded.empty())
    return distckpt::is_torch_model_filename(loaded) ? Format::kTorchSave : Format::kHuggingFace;
  if (has_safetensors(folder)) return Format::kHuggingFace;
  const bool bin = holds(folder, [](const fs::path& path) {
    return distckpt::is_torch_model_filename(path.filename().string());
  });
  if (bin) return Format::kTorchSave;
  if (is_archive(folder)) return Format::kArchive;
  return is_hf_folder(folder) ? std::optional(Format::kHuggingFace) : std::nullopt;
}

Iteration read_tracker(const fs::path& path) {
  auto text = distckpt::read_text(path, 1024);
  while (!text.empty() && std::string_view(" \n\r\t").find(text.back()) != std::string_view::npos)
    text.pop_back();
  const auto iteration = distckpt::parse_iteration(text);
  require(iteration.has_value(), ErrorKind::kCorrupt,
          "{}: holds \"{}\", neither a number nor \"release\"", path.string(), text.substr(0, 40));
  return *iteration;
}

// The iteration that a folder's name says, or that of a folder above it: .../global_step_10/actor.
std::optional<Iteration> iteration_of(const fs::path& folder) {
  auto path = distckpt::canonical_source(folder);
  if (auto iteration = distckpt::parse_iteration_folder(path.filename().string())) return iteration;
  for (int above = 0; above < 4; ++above, path = path.parent_path()) {
    if (auto step = distckpt::parse_step_folder(path.filename().string())) return step;
  }
  return std::nullopt;
}

// A model as verl lays it out, found from its step's folder or from the actor's: weights of FSDP by
// rank, a torch_dist checkpoint in dist_ckpt/, or weights in huggingface/. Newer releases put them
// into model/.
std::optional<Location> locate_verl(const fs::path& path) {
  for (const auto* inner : {"actor/model", "actor", "model", "."}) {
    const auto base = *inner == '.' ? path : path / inner;
    const auto huggingface = base / "huggingface";
    const auto weights = format_without_iterations(huggingface);
    const bool has_weights =
        weights && (*weights == Format::kTorchSave || has_safetensors(huggingface));
    Location found{.root = path, .iteration = iteration_of(path)};
    if (distckpt::source_exists(huggingface / distckpt::kHfConfig)) found.hf = huggingface;
    if (holds(base, [](const fs::path& file) {
          return distckpt::parse_fsdp_filename(file.filename().string()).has_value();
        })) {
      found.format = Format::kFsdp;
      found.folder = base;
      return found;
    }
    // If the weights are kept for Hugging Face, dist_ckpt has the optimizer alone.
    if (has_weights) {
      found.format = *weights;
      found.folder = huggingface;
      return found;
    }
    const auto dist = base / "dist_ckpt";
    if (const auto format = format_of_iteration(dist)) {
      found.format = *format;
      found.folder = dist;
      return found;
    }
  }
  return std::nullopt;
}

// The one checkpoint of an iteration's folder.
std::optional<Location> locate_single(const fs::path& path) {
  const auto format = format_of_iteration(path);
  if (!format) return locate_verl(path);
  Location found{.format = *format, .root = path, .folder = path, .iteration = iteration_of(path)};
  const auto huggingface = path.parent_path() / "huggingface";  // beside verl's dist_ckpt
  if (path.filename() == "dist_ckpt" && distckpt::source_exists(huggingface / distckpt::kHfConfig))
    found.hf = huggingface;
  return found;
}

// The iterations that a root of Megatron or verl holds.
std::vector<std::pair<Iteration, fs::path>> list_iterations(const fs::path& root) {
  std::vector<std::pair<Iteration, fs::path>> found;
  for (const auto& path : distckpt::list_source(root)) {
    const auto name = path.filename().string();
    auto iteration = distckpt::parse_iteration_folder(name);
    if (!iteration) iteration = distckpt::parse_step_folder(name);
    if (iteration && locate_single(path)) found.emplace_back(*iteration, path);
  }
  return found;
}

Location locate_iteration(const fs::path& root, std::optional<Iteration> wanted) {
  const auto tracker = root / distckpt::kTracker;
  const auto there = list_iterations(root);
  const bool by_tracker = !wanted && distckpt::source_exists(tracker);
  if (by_tracker) wanted = read_tracker(tracker);
  if (!wanted && there.size() == 1) wanted = there.front().first;
  if (!wanted) {
    throw Error(ErrorKind::kNotFound,
                fmt::format("{}: holds {} iterations and no {}", root.string(), there.size(),
                            distckpt::kTracker),
                "choose one with --iteration");
  }
  const auto at = std::ranges::find(there, *wanted, [](const auto& one) { return one.first; });
  if (at == there.end()) {
    std::vector<std::string> names;
    for (const auto& [iteration, folder] : there)
      names.push_back(distckpt::iteration_text(iteration));
    throw Error(
        ErrorKind::kNotFound,
        fmt::format("{}: is not there, or holds neither {} nor mp_rank_*{}",
                    (root / distckpt::iteration_folder(*wanted)).string(),
                    distckpt::kTorchDistMetadata,
                    by_tracker ? fmt::format("; {} names it", distckpt::kTracker) : ""),
        names.empty() ? "" : fmt::format("iterations that are there: {}", fmt::join(names, ", ")));
  }
  auto found = *locate_single(at->second);
  found.root = root;
  found.iteration = wanted;
  return found;
}

}  // namespace

std::string_view to_string(Format format) {
  return kFormatNames[static_cast<std::size_t>(format)].name;
}

std::string_view describe(Format format) {
  return kFormatNames[static_cast<std::size_t>(format)].words;
}

bool Location::has_own_config() const {
  switch (format) {
    case Format::kHuggingFace:
    case Format::kArchive:
      return true;
    case Format::kTorchSave:
    case Format::kDcp:
    case Format::kFsdp:
      return distckpt::source_exists(config_folder() / distckpt::kHfConfig);
    case Format::kTorchDist:
    case Format::kLegacy:
    case Format::kZarr:
      return false;
  }
  return false;
}

Location locate(const fs::path& path, std::optional<Iteration> iteration) {
  require(!path.empty(), ErrorKind::kUsage, "\"\": names no checkpoint");
  distckpt::refuse_mistaken_path(path);
  if (distckpt::is_remote(path)) distckpt::RemoteTree::instance().add_root(path);
  if (!distckpt::source_exists(path)) {
    throw Error(ErrorKind::kNotFound, fmt::format("{}: is not there", path.string()),
                hint_for_missing(path));
  }
  if (is_archive_file(path)) return locate(folder_of_file(path), iteration);
  if (!distckpt::source_is_folder(path)) {
    throw Error(
        ErrorKind::kNotFound, fmt::format("{}: is not a folder", path.string()),
        path.extension() == distckpt::kSafetensorsSuffix
            ? fmt::format("a checkpoint is named by its folder: {}", folder_of_file(path).string())
            : "");
  }
  require_no_other_folder(path);
  if (auto found = locate_single(path)) {
    require(!iteration, ErrorKind::kUsage,
            "{}: is the folder of one iteration, so --iteration has nothing to choose",
            path.string());
    return *found;
  }
  if (distckpt::source_exists(path / distckpt::kTracker) || !list_iterations(path).empty()) {
    return locate_iteration(path, iteration);
  }
  if (distckpt::is_torch_dist(path / "weights")) {  // NeMo 2
    require(!iteration, ErrorKind::kUsage,
            "{}: holds one checkpoint (weights/), so --iteration has nothing to choose",
            path.string());
    return {.format = Format::kTorchDist, .root = path, .folder = path / "weights"};
  }
  if (const auto format = format_without_iterations(path)) {
    require(!iteration, ErrorKind::kUsage, "{}: is {}, which has no iterations", path.string(),
            *format == Format::kArchive ? "an archive" : "a Hugging Face checkpoint");
    return {.format = *format, .root = path, .folder = path};
  }
  throw Error(
      ErrorKind::kNotFound, fmt::format("{}: holds no checkpoint that is known", path.string()),
      fmt::format("looked for {} or iter_*/ or release/ (Megatron-Core), {} or mp_rank_*/ (one "
                  "iteration of it), global_step_*/ or actor/ (verl), {} with *.safetensors or "
                  "pytorch_model*.bin (Hugging Face), {} (archive)",
                  distckpt::kTracker, distckpt::kTorchDistMetadata, distckpt::kHfConfig,
                  distckpt::shard_store_filename(0, 1)));
}

bool lacks_iterations(const fs::path& path) {
  if (is_archive_file(path)) return true;
  return distckpt::source_is_folder(path) && !locate_single(path) &&
         !distckpt::source_exists(path / distckpt::kTracker) && list_iterations(path).empty() &&
         format_without_iterations(path).has_value();
}

bool holds_checkpoint(const fs::path& folder) {
  return distckpt::source_is_folder(folder) &&
         (locate_single(folder) ||
          (list_iterations(folder).empty() &&
           (distckpt::is_torch_dist(folder / "weights") || format_without_iterations(folder))));
}

bool is_archive(const fs::path& folder) {
  return holds(folder, is_archive_file);
}

}  // namespace ferry::converter
