#include "converter/stored/sidecar.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/elements/digest.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::digest_block;
using nlohmann::json;

constexpr std::string_view kSidecarFormat = "ferry-sidecar-1";

std::string digest_text(std::string_view text) {
  return to_string(digest_block(distckpt::as_bytes(text)));
}

// The names below the sidecar, relative to it, of all files but the index and derived tensors
// (which are payload).
std::vector<std::string> list_files(const fs::path& sidecar) {
  std::vector<std::string> names;
  for (const auto* folder : {&distckpt::kSidecarHf, &distckpt::kSidecarHeaders}) {
    for (const auto& path : distckpt::list_source(sidecar / *folder))
      names.push_back(fmt::format("{}/{}", *folder, path.filename().string()));
  }
  std::ranges::sort(names);
  return names;
}

// sidecar.json, checked against itself and against the files it lists.
json read_index(const fs::path& sidecar, Links links) {
  const auto path = sidecar / distckpt::kSidecarIndex;
  const auto source = path.string();
  auto index = distckpt::parse_json(distckpt::read_text(path), source);
  const auto stated = distckpt::json_string_at(index, "digest", source);
  index.erase("digest");
  require(stated == digest_text(index.dump()), ErrorKind::kCorrupt, "{}: is not as it was written",
          source);
  require(index.value("format", "") == kSidecarFormat, ErrorKind::kLayout,
          "{}: is of a newer format than {}", source, kSidecarFormat);
  std::vector<fs::path> paths;
  for (const auto& name : list_files(sidecar)) paths.push_back(sidecar / name);
  distckpt::open_sources(paths);
  std::set<std::string> listed;
  for (const auto& [name, value] : distckpt::json_at(index, "files", source).items()) {
    const auto slash = name.find('/');
    const auto folder = name.substr(0, slash);
    require(folder == distckpt::kSidecarHf || folder == distckpt::kSidecarHeaders,
            ErrorKind::kCorrupt, "{}: lists {}, which is no part of a sidecar", source, name);
    distckpt::require_plain_filename(slash == std::string::npos ? "" : name.substr(slash + 1),
                                     source);
    const auto file = sidecar / name;
    require(distckpt::source_exists(file), ErrorKind::kCorrupt, "{}: is missing", file.string());
    distckpt::ReadFile opened(file);
    if (links == Links::kInside) opened.require_inside(sidecar.parent_path());
    const auto digest = distckpt::json_string(value, name, source);
    if (to_string(CarriedFile(std::move(opened)).digest()) != digest) {
      throw Error(ErrorKind::kCorrupt, fmt::format("{}: is not as it was written", file.string()),
                  "to convert with an edited configuration, name its folder with --hf-config");
    }
    listed.insert(name);
  }
  for (const auto& name : list_files(sidecar)) {
    require(listed.contains(name), ErrorKind::kCorrupt, "{}: does not list {}", source, name);
  }
  return index;
}

}  // namespace

fs::path derived_path(const fs::path& iteration_folder) {
  return iteration_folder / distckpt::kSidecar / distckpt::kSidecarDerived;
}

HfForm form_of_sidecar(const std::map<std::string, std::string>& files, const fs::path& folder) {
  HfForm form;
  form.folder = folder / distckpt::kSidecarHf;
  for (const auto& [path, text] : files) {
    const auto source = (folder / path).string();
    const auto slash = path.find('/');
    const auto name = slash == std::string::npos ? "" : path.substr(slash + 1);
    distckpt::require_plain_filename(name, source);
    const auto part = path.substr(0, slash);
    require(part == distckpt::kSidecarHf || part == distckpt::kSidecarHeaders, ErrorKind::kCorrupt,
            "{}: is no part of a sidecar", source);
    if (part == distckpt::kSidecarHeaders) {
      require(name.ends_with(distckpt::kSafetensorsSuffix), ErrorKind::kCorrupt,
              "{}: is the header of a file that is no {}", source, distckpt::kSafetensorsSuffix);
      form.headers.push_back(distckpt::parse_safetensors_prefix(text, name, source));
    } else if (name == distckpt::kSafetensorsIndex) {
      form.index_text = text;
    } else if (name == distckpt::kPartRecord) {
      form.part = parse_part(text, source);
    } else {
      // Beside the files of the index it could be another model, which transformers would load.
      require(travels(name), ErrorKind::kCorrupt,
              "{}: is hidden or holds weights, and is no part of a sidecar", source);
      form.carried.push_back(name);
      form.contents.emplace(name, text);
    }
  }
  require(form.contents.contains(std::string(distckpt::kHfConfig)), ErrorKind::kCorrupt,
          "{}: is missing", form.config_source());
  if (form.headers.empty()) return form;
  const auto index = (form.folder / distckpt::kSafetensorsIndex).string();
  require(form.index_text || form.headers.size() == 1, ErrorKind::kCorrupt,
          "{}: is missing, where there are headers of {} files", index, form.headers.size());
  if (form.index_text) check_index(*form.index_text, files_of_tensors(form.headers), index);
  WeightFiles weights{.folder = form.folder,
                      .index = form.index_text ? distckpt::kSafetensorsIndex : std::string_view()};
  for (const auto& header : form.headers) weights.files.insert(header.filename);
  if (weights.files.contains(std::string(distckpt::kSafetensorsModel)))
    weights.single = distckpt::kSafetensorsModel;
  require_transformers_reads(form, weights);
  return form;
}

std::map<std::string, CarriedFile> sidecar_files(const HfForm& form, bool keep_headers) {
  std::map<std::string, CarriedFile> files;
  const auto add = [&](std::string_view folder, std::string_view name, auto content) {
    files.emplace(fmt::format("{}/{}", folder, name), std::move(content));
  };
  for (const auto& name : form.carried) add(distckpt::kSidecarHf, name, form.file(name));
  if (!form.part.empty()) add(distckpt::kSidecarHf, distckpt::kPartRecord, write_part(form.part));
  if (!keep_headers || form.headers.empty()) return files;
  if (form.index_text) add(distckpt::kSidecarHf, distckpt::kSafetensorsIndex, *form.index_text);
  for (const auto& header : form.headers) {
    add(distckpt::kSidecarHeaders, header.filename, header.prefix);
  }
  return files;
}

void carry_part(const HfForm& form, const fs::path& folder) {
  if (!form.part.empty())
    distckpt::write_text(folder / distckpt::kPartRecord, write_part(form.part));
}

std::optional<HfForm> read_sidecar(const fs::path& iteration_folder, Links links) {
  const auto sidecar = iteration_folder / distckpt::kSidecar;
  if (!distckpt::source_exists(sidecar / distckpt::kSidecarIndex)) {
    require(!distckpt::source_exists(sidecar), ErrorKind::kCorrupt, "{}: holds no {}",
            sidecar.string(), distckpt::kSidecarIndex);
    return std::nullopt;
  }
  const auto contents = read_index(sidecar, links);
  std::map<std::string, std::string> files;
  std::vector<std::string> left_there;  // may be large
  for (const auto& path : list_files(sidecar)) {
    const auto slash = path.find('/');
    auto name = path.substr(slash + 1);
    if (path.substr(0, slash) == distckpt::kSidecarHf && travels(name) &&
        name != distckpt::kHfConfig) {
      left_there.push_back(std::move(name));
    } else {
      files.emplace(path, distckpt::read_text(sidecar / path));
    }
  }
  auto form = form_of_sidecar(files, sidecar);
  std::ranges::move(left_there, std::back_inserter(form.carried));
  std::ranges::sort(form.carried);
  if (const auto dtypes = contents.find("dtypes"); dtypes != contents.end()) {
    const auto source = (sidecar / distckpt::kSidecarIndex).string();
    for (const auto& [name, value] : dtypes->items()) {
      const auto dtype =
          distckpt::dtype_from_safetensors(distckpt::json_string(value, name, source));
      require(dtype.has_value(), ErrorKind::kCorrupt, "{}: {}: unknown dtype", source, name);
      form.dtypes.emplace(name, *dtype);
    }
  }
  if (const auto shapes = contents.find("shapes"); shapes != contents.end()) {
    const auto source = (sidecar / distckpt::kSidecarIndex).string();
    for (const auto& item : shapes->items())
      form.shapes.emplace(item.key(), distckpt::json_dims_at(*shapes, item.key(), source));
  }
  return form;
}

void write_sidecar(const fs::path& iteration_folder,
                   const HfForm& form,
                   bool keep_headers,
                   const std::map<std::string, distckpt::DType>& dtypes,
                   const std::map<std::string, distckpt::Shape>& shapes) {
  const auto sidecar = iteration_folder / distckpt::kSidecar;
  json index = {{"format", kSidecarFormat}, {"files", json::object()}};
  for (const auto& [name, file] : sidecar_files(form, keep_headers)) {
    fs::create_directories((sidecar / name).parent_path());
    file.copy_to(sidecar / name);
    index["files"][name] = to_string(file.digest());
  }
  for (const auto& [name, dtype] : dtypes)
    index["dtypes"][name] = std::string(safetensors_name(dtype));
  if (!keep_headers || form.headers.empty()) {
    for (const auto& [name, shape] : shapes)
      index["shapes"][name] = std::vector<std::int64_t>(shape.begin(), shape.end());
  }
  index["digest"] = digest_text(index.dump());
  distckpt::write_text(sidecar / distckpt::kSidecarIndex, index.dump(1) + "\n");
}

}  // namespace ferry::converter
