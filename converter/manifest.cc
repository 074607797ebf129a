#include "converter/manifest.h"

#include <map>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {
namespace {

using distckpt::Digest;
using nlohmann::json;

constexpr std::string_view kManifestFormat = "ferry-manifest-1";

Digest parse_digest(const json& object, std::string_view source) {
  const auto text = distckpt::json_string_at(object, "digest", source);
  const auto digest = distckpt::digest_from_string(text);
  require(digest.has_value(), ErrorKind::kCorrupt, "{}: \"{}\" is not a digest", source, text);
  return *digest;
}

// A line for each entry that is missing, surplus or different.
template <typename Entry, typename Name, typename Same>
void compare(const std::vector<Entry>& expected,
             const std::vector<Entry>& found,
             std::string_view what,
             Name&& name,
             Same&& same,
             std::vector<std::string>& lines) {
  std::map<std::string_view, const Entry*> rest;
  for (const auto& entry : found) rest.emplace(name(entry), &entry);
  for (const auto& entry : expected) {
    const auto at = rest.find(name(entry));
    if (at == rest.end()) {
      lines.push_back(fmt::format("{}: the {} is missing", name(entry), what));
      continue;
    }
    if (!same(entry, *at->second))
      lines.push_back(fmt::format("{}: the {} differs", name(entry), what));
    rest.erase(at);
  }
  for (const auto& [key, entry] : rest)
    lines.push_back(fmt::format("{}: the {} is not in the manifest", key, what));
}

}  // namespace

std::string write_manifest(const Manifest& manifest) {
  nlohmann::ordered_json root;
  root["format"] = kManifestFormat;
  root["checkpoint"] = manifest.format;
  root["model"] = manifest.model_digest;
  if (!manifest.part.empty()) root["part"] = part_json(manifest.part);
  json tensors = json::object();
  for (const auto& tensor : manifest.tensors) {
    auto& entry = tensors[tensor.name];
    entry["dtype"] = std::string(safetensors_name(tensor.dtype));
    entry["shape"] = std::vector<std::int64_t>(tensor.shape.begin(), tensor.shape.end());
    entry["digest"] = to_string(tensor.digest);
    if (tensor.role == distckpt::Role::kDerived) entry["derived"] = true;
  }
  root["tensors"] = std::move(tensors);
  json files = json::object();
  for (const auto& file : manifest.files) {
    files[file.path] = {{"size", file.size}, {"digest", to_string(file.digest)}};
  }
  root["files"] = std::move(files);
  return root.dump(1) + "\n";
}

Manifest parse_manifest(std::string_view text, std::string_view source) {
  const auto root = distckpt::parse_json(text, source);
  distckpt::require_json_format(root, kManifestFormat, source);
  Manifest manifest{.format = distckpt::json_string_at(root, "checkpoint", source),
                    .model_digest = distckpt::json_string_at(root, "model", source),
                    .tensors = {},
                    .files = {}};
  if (root.contains("part")) manifest.part = parse_part_json(root.at("part"), source);
  for (const auto& [name, value] : distckpt::json_at(root, "tensors", source).items()) {
    const auto where = fmt::format("{}: {}", source, name);
    const auto dtype =
        distckpt::dtype_from_safetensors(distckpt::json_string_at(value, "dtype", where));
    require(dtype.has_value(), ErrorKind::kCorrupt, "{}: unknown dtype", where);
    ManifestTensor tensor{.name = name,
                          .dtype = *dtype,
                          .shape = distckpt::json_dims_at(value, "shape", where),
                          .digest = parse_digest(value, where)};
    if (value.contains("derived")) tensor.role = distckpt::Role::kDerived;
    manifest.tensors.push_back(std::move(tensor));
  }
  for (const auto& [path, value] : distckpt::json_at(root, "files", source).items()) {
    const auto where = fmt::format("{}: {}", source, path);
    manifest.files.push_back(
        {.path = path,
         .size = distckpt::json_int(distckpt::json_at(value, "size", where), "size", where),
         .digest = parse_digest(value, where)});
  }
  return manifest;
}

std::vector<std::string> compare_manifests(const Manifest& expected,
                                           const Manifest& found,
                                           bool with_files) {
  std::vector<std::string> lines;
  const auto stored = [](const Manifest& manifest) {
    std::vector<ManifestTensor> tensors;  // derived ones come and go with the format
    for (const auto& tensor : manifest.tensors) {
      if (tensor.role == distckpt::Role::kWeight) tensors.push_back(tensor);
    }
    return tensors;
  };
  compare(
      stored(expected), stored(found), "tensor",
      [](const auto& tensor) { return std::string_view(tensor.name); },
      [](const auto& a, const auto& b) {
        return a.dtype == b.dtype && a.shape == b.shape && a.digest == b.digest;
      },
      lines);
  if (with_files) {
    compare(
        expected.files, found.files, "file",
        [](const auto& file) { return std::string_view(file.path); },
        [](const auto& a, const auto& b) { return a.size == b.size && a.digest == b.digest; },
        lines);
  }
  return lines;
}

}  // namespace ferry::converter
