#include "converter/delta/delta_manifest.h"

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {
namespace {

using distckpt::json_at;
using distckpt::json_int;
using distckpt::json_string_at;
using nlohmann::json;

constexpr std::string_view kDeltaFormat = "ferry-delta-1";

distckpt::Digest digest_at(const json& object, std::string_view key, std::string_view source) {
  const auto text = json_string_at(object, key, source);
  const auto digest = distckpt::digest_from_string(text);
  require(digest.has_value(), ErrorKind::kCorrupt, "{}: {}: \"{}\" is not a digest", source, key,
          text);
  return *digest;
}

DeltaTensor parse_tensor(const std::string& name, const json& entry, std::string_view source) {
  const auto dtype = json_string_at(entry, "dtype", source);
  const auto known = distckpt::dtype_from_safetensors(dtype);
  require(known.has_value(), ErrorKind::kCorrupt, "{}: {}: the dtype {} is unknown", source, name,
          dtype);
  DeltaTensor tensor{
      .name = name,
      .dtype = *known,
      .shape = distckpt::json_dims_at(entry, "shape", fmt::format("{}: {}", source, name))};
  require(distckpt::checked_volume(tensor.shape).has_value(), ErrorKind::kCorrupt,
          "{}: {}: the shape {} is too large", source, name, to_string(tensor.shape));
  tensor.base = digest_at(entry, "base", source);
  tensor.result = entry.contains("result") ? digest_at(entry, "result", source) : tensor.base;
  if (entry.contains("changed")) {
    tensor.num_changed = json_int(entry["changed"], "changed", source);
    require(tensor.num_changed > 0 && tensor.num_changed <= tensor.shape.product(),
            ErrorKind::kCorrupt, "{}: {}: changed: {} of {} elements", source, name,
            tensor.num_changed, tensor.shape.product());
  }
  return tensor;
}

std::string model_of(const DeltaManifest& manifest, distckpt::Digest DeltaTensor::*end) {
  std::vector<distckpt::NamedDigest> named;
  for (const auto& tensor : manifest.tensors)
    named.push_back({.name = tensor.name, .digest = tensor.*end});
  return to_string(distckpt::digest_model(std::move(named)));
}

}  // namespace

std::string DeltaManifest::base_digest() const {
  return model_of(*this, &DeltaTensor::base);
}

std::string DeltaManifest::result_digest() const {
  return model_of(*this, &DeltaTensor::result);
}

std::string write_delta_manifest(const DeltaManifest& manifest) {
  nlohmann::ordered_json root;
  root["format"] = kDeltaFormat;
  root["base"] = manifest.base_digest();
  root["result"] = manifest.result_digest();
  root["keep_fp8"] = manifest.keep_quantized;
  json tensors = json::object();
  for (const auto& tensor : manifest.tensors) {
    auto& entry = tensors[tensor.name];
    entry["dtype"] = std::string(safetensors_name(tensor.dtype));
    entry["shape"] = std::vector<std::int64_t>(tensor.shape.begin(), tensor.shape.end());
    entry["base"] = to_string(tensor.base);
    if (tensor.num_changed == 0) continue;
    entry["result"] = to_string(tensor.result);
    entry["changed"] = tensor.num_changed;
  }
  root.emplace("tensors", std::move(tensors));
  json files = json::object();
  for (const auto& file : manifest.files)
    files[file.name] = {{"size", file.size}, {"digest", to_string(file.digest)}};
  root.emplace("files", std::move(files));
  return root.dump(1) + "\n";
}

DeltaManifest parse_delta_manifest(std::string_view text, std::string_view source) {
  const auto root = distckpt::parse_json(text, source);
  distckpt::require_json_format(root, kDeltaFormat, source);
  DeltaManifest manifest;
  const auto& keep_quantized = json_at(root, "keep_fp8", source);
  require(keep_quantized.is_boolean(), ErrorKind::kCorrupt, "{}: keep_fp8: is no truth value",
          source);
  manifest.keep_quantized = keep_quantized.get<bool>();
  const auto& tensors = json_at(root, "tensors", source);
  require(tensors.is_object(), ErrorKind::kCorrupt, "{}: tensors: is no object", source);
  for (const auto& [name, entry] : tensors.items())
    manifest.tensors.push_back(parse_tensor(name, entry, source));
  const auto& files = json_at(root, "files", source);
  require(files.is_object(), ErrorKind::kCorrupt, "{}: files: is no object", source);
  for (const auto& [name, entry] : files.items())
    manifest.files.push_back({.name = name,
                              .size = json_int(json_at(entry, "size", source), "size", source),
                              .digest = digest_at(entry, "digest", source)});
  const auto require_end = [&](std::string_view key, const std::string& found) {
    const auto stated = json_string_at(root, key, source);
    require(stated == found, ErrorKind::kCorrupt, "{}: {}: says {}, its tensors' digests give {}",
            source, key, stated, found);
  };
  require_end("base", manifest.base_digest());
  require_end("result", manifest.result_digest());
  return manifest;
}

}  // namespace ferry::converter
