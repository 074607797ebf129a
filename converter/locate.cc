#include "converter/locate.h"

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
    if (iteration && distckpt::is_torch_dist(entry.path())) found.push_back(*iteration);
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
  if (!distckpt::is_torch_dist(folder)) {
    const bool legacy = fs::exists(folder / "mp_rank_00") || fs::exists(folder / "mp_rank_00_000");
    std::vector<std::string> names;
    for (const auto& one : there) names.push_back(distckpt::iteration_text(one));
    throw Error(
        ErrorKind::kNotFound,
        legacy ? fmt::format("{}: is a legacy checkpoint (mp_rank_*), which is not read",
                             folder.string())
               : fmt::format("{}: is not there, or holds no {}", folder.string(),
                             distckpt::kTorchDistMetadata),
        names.empty() ? "" : fmt::format("iterations that are there: {}", fmt::join(names, ", ")));
  }
  return {.format = Format::kTorchDist, .root = root, .folder = folder, .iteration = wanted};
}

}  // namespace

std::string_view to_string(Format format) {
  return format == Format::kHuggingFace ? "huggingface" : "torch_dist";
}

Location locate(const fs::path& path, std::optional<Iteration> iteration) {
  require(fs::exists(path), ErrorKind::kNotFound, "{}: is not there", path.string());
  require(fs::is_directory(path), ErrorKind::kNotFound, "{}: is not a folder", path.string());
  if (distckpt::is_torch_dist(path)) {
    require(!iteration, ErrorKind::kUsage,
            "{}: is the folder of one iteration, so --iteration has nothing to choose",
            path.string());
    const auto name = fs::weakly_canonical(path).filename().string();
    return {.format = Format::kTorchDist,
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
    return {.format = Format::kTorchDist,
            .root = path,
            .folder = path / "weights",
            .iteration = std::nullopt};
  }
  if (is_hf_folder(path)) {
    require(!iteration, ErrorKind::kUsage,
            "{}: is a Hugging Face checkpoint, which has no iterations", path.string());
    return {
        .format = Format::kHuggingFace, .root = path, .folder = path, .iteration = std::nullopt};
  }
  throw Error(
      ErrorKind::kNotFound, fmt::format("{}: holds no checkpoint that is known", path.string()),
      fmt::format(
          "looked for {} or iter_*/ or release/ (Megatron-Core), {} (one iteration of it), {} and "
          "*.safetensors (Hugging Face)",
          distckpt::kTracker, distckpt::kTorchDistMetadata, distckpt::kHfConfig));
}

bool is_hf_checkpoint(const fs::path& path) {
  return is_hf_folder(path) && !distckpt::is_torch_dist(path) &&
         !fs::exists(path / distckpt::kTracker) && list_iterations(path).empty();
}

}  // namespace ferry::converter
