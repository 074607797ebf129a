#include "converter/locate.h"

#include <algorithm>
#include <string>
#include <vector>

#include "converter/hf_folder.h"
#include "distckpt/error.h"
#include "distckpt/file_io.h"
#include "distckpt/torch_dist.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::Iteration;

template <typename Matches>
bool holds(const fs::path& folder, Matches&& matches) {
  return fs::is_directory(folder) &&
         std::ranges::any_of(fs::directory_iterator(folder),
                             [&](const auto& entry) { return matches(entry.path()); });
}

// The first file of an archive.
bool is_archive_file(const fs::path& path) {
  return fs::is_regular_file(path) &&
         distckpt::shard_store_file_count(path.filename().string()).has_value();
}

// The format of an iteration's folder, or of a folder that is like one.
std::optional<Format> format_of_iteration(const fs::path& folder) {
  if (distckpt::is_torch_dist(folder)) return Format::kTorchDist;
  const bool legacy = holds(folder, [](const fs::path& path) {
    return distckpt::parse_rank_folder(path.filename().string()).has_value();
  });
  return legacy ? std::optional(Format::kLegacy) : std::nullopt;
}

std::optional<Format> format_without_iterations(const fs::path& folder) {
  const bool safetensors = holds(folder, [](const fs::path& path) {
    return path.extension() == distckpt::kSafetensorsSuffix;
  });
  if (safetensors) return Format::kHuggingFace;
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

// The iterations that a Megatron root holds.
std::vector<Iteration> list_iterations(const fs::path& root) {
  std::vector<Iteration> found;
  for (const auto& entry : fs::directory_iterator(root)) {
    const auto iteration = distckpt::parse_iteration_folder(entry.path().filename().string());
    if (iteration && format_of_iteration(entry.path())) found.push_back(*iteration);
  }
  return found;
}

Location locate_iteration(const fs::path& root, std::optional<Iteration> wanted) {
  const auto tracker = root / distckpt::kTracker;
  const auto there = list_iterations(root);
  if (!wanted && fs::exists(tracker)) wanted = read_tracker(tracker);
  if (!wanted && there.size() == 1) wanted = there.front();
  if (!wanted) {
    throw Error(ErrorKind::kNotFound,
                fmt::format("{}: holds {} iterations and no {}", root.string(), there.size(),
                            distckpt::kTracker),
                "choose one with --iteration");
  }
  const auto folder = root / distckpt::iteration_folder(*wanted);
  const auto format = format_of_iteration(folder);
  if (!format) {
    std::vector<std::string> names;
    for (const auto& one : there) names.push_back(distckpt::iteration_text(one));
    throw Error(
        ErrorKind::kNotFound,
        fmt::format("{}: is not there, or holds neither {} nor mp_rank_*", folder.string(),
                    distckpt::kTorchDistMetadata),
        names.empty() ? "" : fmt::format("iterations that are there: {}", fmt::join(names, ", ")));
  }
  return {.format = *format, .root = root, .folder = folder, .iteration = wanted};
}

}  // namespace

std::string_view to_string(Format format) {
  switch (format) {
    case Format::kHuggingFace:
      return "huggingface";
    case Format::kTorchSave:
      return "torch_save";
    case Format::kTorchDist:
      return "torch_dist";
    case Format::kLegacy:
      return "megatron_legacy";
    case Format::kArchive:
      return "archive";
  }
  return "";
}

bool Location::has_own_config() const {
  return format == Format::kHuggingFace || format == Format::kArchive ||
         (format == Format::kTorchSave && fs::exists(folder / distckpt::kHfConfig));
}

Location locate(const fs::path& path, std::optional<Iteration> iteration) {
  require(fs::exists(path), ErrorKind::kNotFound, "{}: is not there", path.string());
  if (is_archive_file(path)) return locate(fs::absolute(path).parent_path(), iteration);
  require(fs::is_directory(path), ErrorKind::kNotFound, "{}: is not a folder", path.string());
  if (const auto format = format_of_iteration(path)) {
    require(!iteration, ErrorKind::kUsage,
            "{}: is the folder of one iteration, so --iteration has nothing to choose",
            path.string());
    const auto name = fs::weakly_canonical(path).filename().string();
    return {.format = *format,
            .root = path,
            .folder = path,
            .iteration = distckpt::parse_iteration_folder(name)};
  }
  if (fs::exists(path / distckpt::kTracker) || !list_iterations(path).empty()) {
    return locate_iteration(path, iteration);
  }
  if (distckpt::is_torch_dist(path / "weights")) {  // NeMo 2
    require(!iteration, ErrorKind::kUsage,
            "{}: holds one checkpoint (weights/), so --iteration has nothing to choose",
            path.string());
    return {.format = Format::kTorchDist, .root = path, .folder = path / "weights"};
  }
  if (const auto format = format_without_iterations(path)) {
    require(!iteration, ErrorKind::kUsage,
            "{}: is {}, which has no iterations", path.string(),
            *format == Format::kArchive ? "an archive" : "a Hugging Face checkpoint");
    return {.format = *format, .root = path, .folder = path};
  }
  throw Error(
      ErrorKind::kNotFound, fmt::format("{}: holds no checkpoint that is known", path.string()),
      fmt::format("looked for {} or iter_*/ or release/ (Megatron-Core), {} or mp_rank_*/ (one "
                  "iteration of it), {} with *.safetensors or pytorch_model*.bin (Hugging Face), {} "
                  "(archive)",
                  distckpt::kTracker, distckpt::kTorchDistMetadata, distckpt::kHfConfig,
                  distckpt::shard_store_filename(0, 1)));
}

bool lacks_iterations(const fs::path& path) {
  if (is_archive_file(path)) return true;
  return fs::is_directory(path) && !format_of_iteration(path) &&
         !fs::exists(path / distckpt::kTracker) && list_iterations(path).empty() &&
         format_without_iterations(path).has_value();
}

bool is_archive(const fs::path& folder) {
  return holds(folder, is_archive_file);
}

}  // namespace ferry::converter
