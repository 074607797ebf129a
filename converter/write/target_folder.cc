#include "converter/write/target_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "converter/stored/hf_folder.h"
#include "converter/write/run_config.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/formats/archive/shard_store_trailer.h"
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
constexpr std::array<std::string_view, 18> kCompanions{
    "config.json",     "generation_config.json",   "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json",    "special_tokens_map.json",
    "vocab.json",      "added_tokens.json",        "vocab.txt",
    "merges.txt",      "chat_template.jinja",      "chat_template.json",
    "spiece.model",    "preprocessor_config.json", "processor_config.json",
    "ferry-part.json", "sentencepiece.bpe.model",  "tiktoken.model"};

// True for a name that a conversion gives a file of weights.
bool is_weights(const fs::path& path, Format format) {
  const auto name = path.string();
  switch (format) {
    case Format::kHuggingFace:
      return name == distckpt::kSafetensorsModel ||
             (name.starts_with("model-") && name.ends_with(distckpt::kSafetensorsSuffix));
    case Format::kArchive:
      return distckpt::shard_store_file_count(name).has_value();
    default:
      return distckpt::is_distcp_filename(name);
  }
}

bool is_there(const fs::path& path) {
  return fs::is_regular_file(fs::symlink_status(path));
}

// The files of a checkpoint that lies in a folder, as its own records name them.
struct OwnFiles {
  std::set<fs::path> weights{};
  std::set<fs::path> others{};
  std::string foreign{};  // "which" other weights are
};

OwnFiles own_files_of_hf(const fs::path& folder) {
  OwnFiles own{.others = {kCompanions.begin(), kCompanions.end()},
               .foreign = fmt::format("{} does not name", distckpt::kSafetensorsIndex)};
  own.others.insert(distckpt::kSafetensorsIndex);
  const auto index = folder / distckpt::kSafetensorsIndex;
  if (!is_there(index)) {
    own.weights.insert(distckpt::kSafetensorsModel);
    return own;
  }
  for (const auto& name : files_of_index(distckpt::read_text(index), index.string())) {
    if (name.ends_with(distckpt::kSafetensorsSuffix)) own.weights.insert(name);
  }
  return own;
}

// The names say how many files an archive has. Other programs give their weights such names, too.
OwnFiles own_files_of_archive(const fs::path& folder) {
  OwnFiles own{.foreign = "is no file of an archive"};
  const auto is_own = [&](const fs::path& name) {
    return is_there(folder / name) && distckpt::is_shard_store_file(folder / name);
  };
  for (const auto& path : distckpt::list_source(folder)) {
    const auto count = distckpt::shard_store_file_count(path.filename().string());
    if (!count || !is_own(path.filename())) continue;
    for (std::size_t i = 0; i < *count; ++i) {
      const auto name = distckpt::shard_store_filename(i, *count);
      if (is_own(name)) own.weights.insert(name);
    }
    own.foreign = "is no file of the archive";
    break;
  }
  return own;
}

OwnFiles own_files_of_megatron(const fs::path& folder) {
  OwnFiles own{.others = {distckpt::kTorchDistMetadata, distckpt::kTorchDistConfig,
                          distckpt::kCommon, kRunConfig},
               .foreign = fmt::format("{} does not name", distckpt::kTorchDistMetadata)};
  if (is_there(folder / distckpt::kTorchDistMetadata)) {
    for (const auto& name : distckpt::torch_dist_filenames(folder)) own.weights.insert(name);
  }
  const fs::path sidecar(distckpt::kSidecar);
  const auto list = folder / sidecar / distckpt::kSidecarIndex;
  if (!is_there(list)) return own;
  own.others.insert(sidecar / distckpt::kSidecarIndex);
  own.others.insert(sidecar / distckpt::kSidecarDerived);
  const auto source = list.string();
  const auto index = distckpt::parse_json(distckpt::read_text(list), source);
  for (const auto& [name, _] : distckpt::json_at(index, "files", source).items())
    own.others.insert(sidecar / name);
  return own;
}

OwnFiles own_files(const fs::path& folder, Format format) {
  switch (format) {
    case Format::kHuggingFace:
      return own_files_of_hf(folder);
    case Format::kArchive:
      return own_files_of_archive(folder);
    default:
      return own_files_of_megatron(folder);
  }
}

// A program may keep its settings in a config.json, too.
bool has_config_of_a_model(const fs::path& folder) {
  const auto path = folder / distckpt::kHfConfig;
  if (!is_there(path)) return false;
  try {
    const auto config = distckpt::parse_python_json(distckpt::read_text(path), path.string());
    return config.is_object() && config.contains("model_type");
  } catch (const Error&) {
    return false;
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
  distckpt::refuse_mistaken_path(path);
  require(!path.empty(), ErrorKind::kUsage, "\"\": names no target");
  if (distckpt::is_remote(path)) {
    require(path.string().starts_with("s3://"), ErrorKind::kUsage,
            "{}: a conversion is written to a folder or to S3", path.string());
    auto address = distckpt::address_of(path);
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

void require_writable(const fs::path& target) {
  if (distckpt::is_remote(target)) return;
  auto folder = target;
  if (!fs::is_directory(target)) {
    std::error_code unknown;
    do folder = folder.parent_path();
    while (folder.has_relative_path() && !fs::exists(fs::symlink_status(folder, unknown)));
  }
  const auto check = [&](const fs::path& path) {
    const int error = !fs::is_directory(path)                                             ? ENOTDIR
                      : ::faccessat(AT_FDCWD, path.c_str(), W_OK | X_OK, AT_EACCESS) != 0 ? errno
                                                                                          : 0;
    require(error == 0, ErrorKind::kIo, "{}: cannot be written: {}: {}", target.string(),
            path.string(), distckpt::system_error_text(error));
  };
  check(folder);
  if (folder == target) check(target.parent_path());
}

std::vector<fs::path> replaceable_files(const fs::path& folder,
                                        Format format,
                                        const std::vector<fs::path>& planned) {
  const auto refuse = [&](std::string_view what, std::string_view why) {
    throw Error(ErrorKind::kUsage,
                fmt::format("{}: {}{}, and so it is not overwritten", folder.string(), what, why),
                "move it away, or choose another target");
  };
  const auto opened = distckpt::open_folder(AT_FDCWD, folder);
  if (!opened) refuse("", "is not a folder");
  const auto own = own_files(folder, format);
  std::set<fs::path> known(planned.begin(), planned.end());
  std::erase_if(known, [&](const fs::path& name) { return is_weights(name, format); });
  known.insert(own.weights.begin(), own.weights.end());
  known.insert(own.others.begin(), own.others.end());
  std::set<fs::path> folders;
  for (const auto& file : known) folders.insert(file.parent_path());
  for (const auto& file : known) folders.insert(file.parent_path().parent_path());

  std::vector<fs::path> files;
  bool has_weights = false;
  distckpt::walk_folder(opened->get(), [&](const fs::path& path,
                                           const distckpt::FolderEntry& entry) {
    if (entry.is_folder() && folders.contains(path)) return;
    if (!entry.is_file() || !known.contains(path)) {
      const auto slash = entry.is_folder() ? "/" : "";
      refuse(fmt::format("holds {}{}", path.string(), slash),
             entry.is_file() && is_weights(path, format) ? fmt::format(", which {}", own.foreign)
                                                         : ", which no conversion writes there");
    }
    has_weights = has_weights || own.weights.contains(path) ||
                  path.extension() == distckpt::kSafetensorsSuffix;
    files.push_back(path);
  });
  if (!has_weights) refuse("holds no weights", ": it is not a checkpoint");
  if (format == Format::kHuggingFace && !has_config_of_a_model(folder))
    refuse("holds no config.json of a model", "");
  return files;
}

}  // namespace ferry::converter
