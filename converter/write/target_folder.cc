#include "converter/write/target_folder.h"

#include <fcntl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "converter/stored/hf_folder.h"
#include "converter/write/run_config.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/storage/filenames.h"
#include "distckpt/storage/held_folder.h"
#include "distckpt/storage/network/s3_client.h"
#include "distckpt/storage/remote_store.h"
#include "distckpt/storage/source_tree.h"
#include "distckpt/storage/work_folder.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

// Files that transformers saves beside the weights.
constexpr std::array<std::string_view, 17> kCompanions{
    "config.json",     "generation_config.json",   "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json",    "special_tokens_map.json",
    "vocab.json",      "added_tokens.json",        "vocab.txt",
    "merges.txt",      "chat_template.jinja",      "chat_template.json",
    "spiece.model",    "preprocessor_config.json", "processor_config.json",
    "ferry-part.json", "sentencepiece.bpe.model"};

bool is_weights(std::string_view name, Format format) {
  switch (format) {
    case Format::kHuggingFace:
      return name == distckpt::safetensors_filename(0, 1) ||
             (name.starts_with("model-") && name.ends_with(distckpt::kSafetensorsSuffix));
    case Format::kArchive:
      return distckpt::shard_store_file_count(name).has_value();
    default:
      return distckpt::is_distcp_filename(name);
  }
}

bool is_companion(std::string_view name, Format format) {
  switch (format) {
    case Format::kHuggingFace:
      return name == distckpt::kSafetensorsIndex ||
             std::ranges::find(kCompanions, name) != kCompanions.end();
    case Format::kArchive:
      return false;
    default:
      return name == distckpt::kTorchDistMetadata || name == distckpt::kTorchDistConfig ||
             name == distckpt::kCommon || name == kRunConfig;
  }
}

// The files of a sidecar: those that it lists.
std::set<fs::path> sidecar_listed(const fs::path& iteration_folder) {
  const fs::path sidecar(distckpt::kSidecar);
  std::set<fs::path> names;
  const auto path = iteration_folder / sidecar / distckpt::kSidecarIndex;
  if (!fs::is_regular_file(fs::symlink_status(path))) return names;
  names.insert(sidecar / distckpt::kSidecarIndex);
  names.insert(sidecar / distckpt::kSidecarDerived);
  const auto source = path.string();
  const auto index = distckpt::parse_json(distckpt::read_text(path), source);
  for (const auto& [name, _] : distckpt::json_at(index, "files", source).items())
    names.insert(sidecar / name);
  return names;
}

// The weights of a Hugging Face folder: those that its index lists. Nothing if its config.json is
// no model's.
std::optional<std::set<fs::path>> index_listed(const fs::path& folder) {
  const auto read = [&](std::string_view name) {
    const auto path = folder / name;
    return fs::is_regular_file(fs::symlink_status(path)) ? distckpt::read_text(path)
                                                         : std::string("{}");
  };
  try {
    const auto config = distckpt::parse_python_json(read(distckpt::kHfConfig), "config.json");
    if (!config.is_object() || !config.contains("model_type")) return std::nullopt;
    std::set<fs::path> names;
    if (fs::exists(folder / distckpt::kSafetensorsIndex)) {
      for (const auto& name : files_of_index(read(distckpt::kSafetensorsIndex), "the index")) {
        if (name.ends_with(distckpt::kSafetensorsSuffix)) names.insert(name);
      }
    }
    return names;
  } catch (const Error&) {
    return std::nullopt;
  }
}

bool is_inside(const fs::path& inner, const fs::path& outer) {
  const auto [end, _] = std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end());
  return end == outer.end();
}

// A link on the way to the target that leads nowhere; others are resolved.
void refuse_dangling_link(const fs::path& target) {
  for (auto at = target; at.has_relative_path(); at = at.parent_path()) {
    std::error_code unknown;
    if (!fs::is_symlink(fs::symlink_status(at, unknown))) continue;
    throw Error(ErrorKind::kUsage,
                fmt::format("{}: is a symbolic link to {}, which is not there", at.string(),
                            fs::read_symlink(at).string()),
                "make the folder that it leads to, or remove the link");
  }
}

// An iteration's folder beside the files of another checkpoint would hide that one.
void refuse_checkpoint_as_root(const fs::path& target) {
  const auto root = target.parent_path();
  if (!distckpt::source_is_folder(root)) return;
  const bool has_iterations = distckpt::source_exists(root / distckpt::kTracker);
  if (has_iterations || !holds_checkpoint(root)) return;
  throw Error(ErrorKind::kUsage,
              fmt::format("{}: is a checkpoint of its own, which {} in it would hide",
                          root.string(), target.filename().string()),
              "choose another target");
}

}  // namespace

fs::path resolve_target(const fs::path& path) {
  require(!path.empty(), ErrorKind::kUsage, "\"\": names no target");
  if (distckpt::is_remote(path)) {
    require(path.string().starts_with("s3://"), ErrorKind::kUsage,
            "{}: a conversion is written to a folder or to S3", path.string());
    auto address = path.string();
    while (address.ends_with('/')) address.pop_back();
    require(!distckpt::parse_s3_address(address).key.empty(), ErrorKind::kUsage,
            "{}: is a bucket: name a folder in it", address);
    return address;
  }
  auto resolved = fs::weakly_canonical(fs::absolute(path));
  if (!resolved.has_filename()) resolved = resolved.parent_path();
  return resolved;
}

bool is_checkpoint(const fs::path& folder) {
  return fs::is_directory(folder) &&
         (is_hf_folder(folder) || distckpt::is_torch_dist(folder) || is_archive(folder));
}

bool is_free(const fs::path& target) {
  if (distckpt::is_remote(target)) return true;  // StoreTarget looks at what is there
  refuse_dangling_link(target);
  if (!fs::exists(target)) return true;
  require(fs::is_directory(target), ErrorKind::kUsage, "{}: exists already, and is not a folder",
          target.string());
  return fs::is_empty(target);
}

void refuse_unsafe_target(const fs::path& target,
                          Format format,
                          const fs::path& source_folder,
                          bool overwrite) {
  if (format == Format::kTorchDist) refuse_checkpoint_as_root(target);
  const auto source = distckpt::canonical_source(source_folder);
  require(!is_inside(source, target) && !is_inside(target, source), ErrorKind::kUsage,
          "{}: is the source, lies in it or holds it", target.string());
  if (is_free(target) || overwrite) return;
  throw Error(ErrorKind::kUsage, fmt::format("{}: exists already", target.string()),
              distckpt::WorkFolder::published_earlier(target)
                  ? "an interrupted run published it: --resume takes the last steps"
                  : "choose another target, or replace it with --overwrite");
}

std::vector<fs::path> replaceable_files(const fs::path& folder,
                                        Format format,
                                        const std::vector<fs::path>& planned) {
  const auto refuse = [&](std::string_view what, std::string_view why) {
    throw Error(ErrorKind::kUsage,
                fmt::format("{}: {}{}, and so it is not overwritten", folder.string(), what, why),
                "move it away, or choose another target");
  };
  std::set<fs::path> known(planned.begin(), planned.end());
  if (format == Format::kTorchDist) known.merge(sidecar_listed(folder));
  std::optional<std::set<fs::path>> listed{std::in_place};
  if (format == Format::kHuggingFace) listed = index_listed(folder);
  const bool is_model = listed.has_value();
  if (listed) known.merge(*listed);
  std::set<fs::path> folders;
  for (const auto& file : known) folders.insert(file.parent_path());
  for (const auto& file : known) folders.insert(file.parent_path().parent_path());

  const auto opened = distckpt::open_folder(AT_FDCWD, folder);
  if (!opened) refuse("", "is not a folder");
  std::vector<fs::path> files;
  bool has_weights = false;
  distckpt::walk_folder(
      opened->get(), [&](const fs::path& path, const distckpt::FolderEntry& entry) {
        const bool on_top = !path.has_parent_path();
        if (entry.is_folder()) {
          if (!folders.contains(path))
            refuse(fmt::format("holds {}/", path.string()), ", which no conversion writes there");
          return;
        }
        const bool weights = on_top && is_weights(entry.name, format);
        const bool ours =
            weights || (on_top && is_companion(entry.name, format)) || known.contains(path);
        if (!entry.is_file() || !ours)
          refuse(fmt::format("holds {}", path.string()), ", which no conversion writes there");
        has_weights =
            has_weights || weights ||
            (format == Format::kHuggingFace && path.extension() == distckpt::kSafetensorsSuffix);
        files.push_back(path);
      });
  if (!has_weights) refuse("holds no weights", ": it is not a checkpoint");
  if (!is_model) refuse("holds no config.json of a model", "");
  return files;
}

}  // namespace ferry::converter
