#include "converter/delta/delta.h"

#include <algorithm>
#include <charconv>
#include <iterator>

#include "converter/delta/delta_manifest.h"
#include "converter/delta/slime_version.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;

std::string slime_version_folder(std::int64_t version) {
  return fmt::format("weight_v{:06}", version);
}

std::optional<std::int64_t> parse_slime_version(std::string_view name) {
  constexpr std::string_view kPrefix = "weight_v";
  if (!name.starts_with(kPrefix) || name.size() < kPrefix.size() + 6) return std::nullopt;
  std::int64_t version = 0;
  const auto [end, error] =
      std::from_chars(name.data() + kPrefix.size(), name.data() + name.size(), version);
  if (error != std::errc() || end != name.data() + name.size() || version < 0) return std::nullopt;
  return version;
}

std::map<std::int64_t, fs::path> slime_versions(const fs::path& folder) {
  std::map<std::int64_t, fs::path> versions;
  for (const auto& path : distckpt::list_source(folder)) {
    const auto version = parse_slime_version(path.filename().string());
    if (version && distckpt::source_is_folder(path)) versions.emplace(*version, path);
  }
  return versions;
}

std::vector<std::unique_ptr<Delta>> open_deltas(const fs::path& path) {
  std::vector<std::unique_ptr<Delta>> deltas;
  if (distckpt::source_exists(path / kDeltaManifest)) {
    deltas.push_back(open_ferry_delta(path));
    return deltas;
  }
  if (distckpt::source_exists(path / kPatchFile)) {
    throw Error(ErrorKind::kLayout,
                fmt::format("{}: holds a patch for vLLM, which names no base", path.string()),
                "`ferry delta make` without --to vllm writes what apply, verify and inspect take");
  }
  if (is_slime_delta(path)) {
    deltas.push_back(open_slime_delta(path));
    return deltas;
  }
  for (const auto& [version, folder] : slime_versions(path)) {
    if (!is_slime_delta(folder)) {
      throw Error(ErrorKind::kLayout,
                  fmt::format("{}: is a whole checkpoint, no delta", folder.string()),
                  "name it as the base, and the versions behind it one by one");
    }
    deltas.push_back(open_slime_delta(folder));
  }
  if (deltas.empty()) {
    throw Error(ErrorKind::kNotFound, fmt::format("{}: no delta lies there", path.string()),
                "a delta is a folder with ferry-delta.json, or one of slime's versions "
                "(weight_v000001), or a folder of these");
  }
  return deltas;
}

void require_chain(const std::vector<std::unique_ptr<Delta>>& deltas) {
  for (std::size_t i = 1; i < deltas.size(); ++i) {
    const auto& before = deltas[i - 1]->summary();
    const auto& after = deltas[i]->summary();
    if (before.form != after.form) continue;
    if (after.form == DeltaForm::kSlime) {
      require(after.base_version == before.version, ErrorKind::kLayout,
              "{}: changes version {}, the delta before it makes version {}", after.path.string(),
              after.base_version, before.version);
    } else {
      require(after.base_digest == before.result_digest, ErrorKind::kLayout,
              "{}: changes the model {}, the delta before it makes {}", after.path.string(),
              after.base_digest, before.result_digest);
    }
  }
}

}  // namespace ferry::converter
