#include "converter/stored/hf_folder.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "converter/families/hf_config.h"
#include "converter/families/quantization.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"
#include "distckpt/storage/remote_store.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

// Files of weights or of a training run's state do not travel along; everything else does.
constexpr std::array<std::string_view, 12> kWeightSuffixes{
    ".safetensors", ".safetensors.index.json",
    ".bin",         ".bin.index.json",
    ".pt",          ".pth",
    ".ckpt",        ".h5",
    ".onnx",        ".msgpack",
    ".gguf",        ".distcp"};

bool is_safetensors(const fs::path& path) {
  return path.extension() == distckpt::kSafetensorsSuffix;
}

std::vector<fs::path> list_safetensors(const fs::path& folder) {
  std::vector<fs::path> files;
  std::ranges::copy_if(distckpt::list_source(folder), std::back_inserter(files), is_safetensors);
  return files;
}

// The safetensors files of the model, as far as they are there: no adapter or older copy that lies
// beside them.
std::vector<fs::path> safetensors_of_model(const fs::path& folder) {
  const auto loaded = loaded_weights(folder);
  if (loaded.empty()) return list_safetensors(folder);
  if (loaded == distckpt::kSafetensorsModel) return {folder / loaded};
  if (loaded != distckpt::kSafetensorsIndex) return {};
  std::vector<fs::path> files;
  const auto index = folder / loaded;
  for (const auto& name : files_of_model(distckpt::read_text(index), index.string())) {
    if (distckpt::source_exists(folder / name)) files.push_back(folder / name);
  }
  return files;
}

// The one safetensors file of a folder without an index.
fs::path single_file(const fs::path& folder) {
  if (distckpt::source_exists(folder / distckpt::kSafetensorsModel))
    return folder / distckpt::kSafetensorsModel;
  const auto files = list_safetensors(folder);
  require(!files.empty(), ErrorKind::kNotFound, "{}: holds neither {} nor {}, and no {} either",
          folder.string(), distckpt::kSafetensorsModel, distckpt::kSafetensorsIndex,
          distckpt::kTorchModel);
  if (files.size() > 1) {
    throw Error(ErrorKind::kNotFound,
                fmt::format("{}: holds {} safetensors files, but no {}", folder.string(),
                            files.size(), distckpt::kSafetensorsIndex),
                "the download may be incomplete");
  }
  const auto name = files.front().filename().string();
  if (name.find("-of-") != std::string::npos) {  // model-00002-of-00003.safetensors
    throw Error(ErrorKind::kNotFound,
                fmt::format("{}: holds {} alone, and neither the other files nor {}",
                            folder.string(), name, distckpt::kSafetensorsIndex),
                "the download may be incomplete");
  }
  return files.front();
}

// The file that config.json names as the one of the weights, which transformers prefers to others.
std::optional<std::string> named_weights(const HfForm& form) {
  const auto config = distckpt::parse_python_json(form.config_text(), form.config_source());
  if (!config.is_object() || !config.contains("transformers_weights")) return std::nullopt;
  const auto& named = config.at("transformers_weights");
  if (named.is_null()) return std::nullopt;
  return distckpt::json_string(named, "transformers_weights", form.config_source());
}

// Folders and pipes do not travel.
bool is_file(const fs::path& path) {
  if (distckpt::is_remote(path)) return distckpt::source_is_file(path);
  std::error_code error;
  const auto type = fs::status(path, error).type();
  if (!fs::is_symlink(path) || (!error && type != fs::file_type::not_found))
    return type == fs::file_type::regular;
  throw Error(
      ErrorKind::kNotFound,
      fmt::format("{}: is a symbolic link to {}, which cannot be read: {}", path.string(),
                  fs::read_symlink(path).string(), error ? error.message() : "it is not there"),
      "mend the link or remove it");
}

}  // namespace

bool travels(std::string_view name) {
  return !name.starts_with('.') && name != distckpt::kPartRecord &&
         std::ranges::none_of(kWeightSuffixes, [&](auto suffix) { return name.ends_with(suffix); });
}

void require_transformers_reads(const HfForm& form, const WeightFiles& weights) {
  const auto& [folder, files, index, single] = weights;
  if (!index.empty() && !single.empty() && files != std::set{std::string(single)}) {
    throw Error(
        ErrorKind::kLayout,
        fmt::format("{}: holds {}, and {}, which names other files", folder.string(), single,
                    index),
        fmt::format("transformers loads {} alone: take away what is not the model", single));
  }
  if (form.folder != folder) return;  // the configuration is of weights elsewhere
  const auto named = named_weights(form);
  const auto read = index.empty() ? *files.begin() : std::string(index);
  if (!named || *named == read) return;
  throw Error(ErrorKind::kLayout,
              fmt::format("{}: transformers_weights names {}, but {} is there to be read",
                          form.config_source(), *named, read),
              "transformers loads the file that is named, and no other");
}

std::string HfForm::config_source() const {
  return (folder / distckpt::kHfConfig).string();
}

std::string HfForm::text(const std::string& name) const {
  return file(name).text();
}

CarriedFile HfForm::file(const std::string& name) const {
  const auto kept = contents.find(name);
  if (kept != contents.end()) return CarriedFile(kept->second);
  distckpt::ReadFile found(folder / name);
  if (files) files->require_same(found);
  return CarriedFile(std::move(found));
}

std::string HfForm::config_text() const {
  return text(std::string(distckpt::kHfConfig));
}

std::optional<distckpt::Shape> HfForm::find(const std::string& tensor) const {
  for (const auto& header : headers) {
    const auto found = std::ranges::find(header.entries, tensor, &distckpt::SafetensorsEntry::name);
    if (found != header.entries.end()) return found->shape;
  }
  if (const auto known = shapes.find(tensor); known != shapes.end()) return known->second;
  return dtypes.contains(tensor) ? std::optional(distckpt::Shape()) : std::nullopt;
}

void HfForm::leave_quantization() {
  const auto text = config_text();
  if (!parse_quantization(text, config_source())) return;
  contents[std::string(distckpt::kHfConfig)] =
      without_quantization(text, distckpt::DType::kBF16, config_source());
  headers.clear();
  index_text.reset();
}

void HfForm::quantize(Quantization::Method method, const std::vector<std::string>& not_converted) {
  contents[std::string(distckpt::kHfConfig)] =
      with_quantization(config_text(), method, not_converted, config_source());
  headers.clear();
  index_text.reset();
}

void HfForm::set_dtype(distckpt::DType dtype) {
  contents[std::string(distckpt::kHfConfig)] = with_dtype(config_text(), dtype, config_source());
}

void HfForm::untie_ends() {
  contents[std::string(distckpt::kHfConfig)] = with_untied_ends(config_text(), config_source());
}

void HfForm::leave_prediction_layers() {
  contents[std::string(distckpt::kHfConfig)] =
      without_prediction_layers(config_text(), config_source());
  headers.clear();
  index_text.reset();
}

const HfForm& form_as(const HfForm& form,
                      const std::optional<distckpt::DType>& dtype,
                      std::optional<HfForm>& cast) {
  if (!dtype) return form;
  cast.emplace(form).set_dtype(*dtype);
  return *cast;
}

std::string_view loaded_weights(const fs::path& folder) {
  for (const auto name : {distckpt::kSafetensorsModel, distckpt::kSafetensorsIndex,
                          distckpt::kTorchModel, distckpt::kTorchModelIndex}) {
    if (distckpt::source_exists(folder / name)) return name;
  }
  return {};
}

bool is_hf_folder(const fs::path& folder) {
  return distckpt::source_exists(folder / distckpt::kHfConfig) || !list_safetensors(folder).empty();
}

HfForm read_hf_companions(const fs::path& folder, Links links) {
  require(distckpt::source_is_folder(folder), ErrorKind::kNotFound, "{}: is not a folder",
          folder.string());
  require(distckpt::source_exists(folder / distckpt::kHfConfig), ErrorKind::kNotFound,
          "{}: holds no {}", folder.string(), distckpt::kHfConfig);
  HfForm form{.folder = folder, .carried = {}, .headers = {}, .index_text = {}};
  std::vector<fs::path> travelling;
  for (const auto& path : distckpt::list_source(folder)) {
    if (travels(path.filename().string()) && is_file(path)) travelling.push_back(path);
  }
  distckpt::open_sources(travelling);
  for (const auto& path : travelling) {
    const distckpt::ReadFile file(path);  // one that cannot be read is told now
    if (links == Links::kInside) file.require_inside(folder);
    form.carried.push_back(path.filename().string());
  }
  const auto part = folder / distckpt::kPartRecord;
  if (distckpt::source_exists(part))
    form.part = parse_part(distckpt::read_text(part), part.string());
  std::ranges::sort(form.carried);
  return form;
}

HfForm read_hf_config(const fs::path& folder, Links links) {
  auto form = read_hf_companions(folder, links);
  form.part.clear();  // it is of the weights that are there
  for (const auto& path : safetensors_of_model(folder)) {
    for (const auto& tensor : distckpt::read_safetensors_header(path).entries)
      form.dtypes.emplace(tensor.name, tensor.dtype);
  }
  return form;
}

HfForm read_hf_folder(const fs::path& folder, Links links, bool incomplete) {
  auto form = read_hf_companions(folder, links);
  const auto index_path = folder / distckpt::kSafetensorsIndex;
  if (distckpt::source_exists(index_path)) {
    form.index_text = distckpt::read_text(index_path);
    const auto source = index_path.string();
    std::vector<fs::path> paths;
    const auto files = files_of_model(*form.index_text, source);
    for (const auto& file : files) paths.push_back(folder / file);
    distckpt::open_sources(paths);
    for (const auto& file : files) {
      const bool is_there = distckpt::source_exists(folder / file);
      require(is_there || incomplete, ErrorKind::kNotFound,
              "{}: names the file {}, which is not there", source, file);
      if (!is_there) continue;
      form.headers.push_back(distckpt::read_safetensors_header(folder / file));
    }
    form.absent = check_index(*form.index_text, files_of_tensors(form.headers), source, incomplete);
    require_transformers_reads(
        form, {.folder = folder,
               .files = files,
               .index = distckpt::kSafetensorsIndex,
               .single = distckpt::source_exists(folder / distckpt::kSafetensorsModel)
                             ? distckpt::kSafetensorsModel
                             : ""});
    return form;
  }
  const auto file = single_file(folder);
  require_transformers_reads(form, {.folder = folder, .files = {file.filename().string()}});
  form.headers.push_back(distckpt::read_safetensors_header(file));
  return form;
}

std::set<std::string> files_of_index(const std::string& index_text, const std::string& source) {
  const auto index = distckpt::parse_json(index_text, source);
  std::set<std::string> files;
  for (const auto& [tensor, file] : distckpt::json_at(index, "weight_map", source).items()) {
    auto name = distckpt::json_string(file, tensor, source);
    distckpt::require_plain_filename(name, source);
    files.insert(std::move(name));
  }
  return files;
}

std::set<std::string> files_of_model(const std::string& index_text, const std::string& source) {
  auto files = files_of_index(index_text, source);
  require(!files.empty(), ErrorKind::kCorrupt, "{}: weight_map is empty", source);
  return files;
}

std::map<std::string, std::string> files_of_tensors(
    const std::vector<distckpt::SafetensorsHeader>& headers) {
  std::map<std::string, std::string> files;
  for (const auto& header : headers) {
    for (const auto& entry : header.entries) {
      const auto [at, added] = files.emplace(entry.name, header.filename);
      require(added, ErrorKind::kCorrupt, "{}: is in {} and in {}", entry.name, at->second,
              header.filename);
    }
  }
  return files;
}

std::vector<std::string> check_index(const std::string& index_text,
                                     const std::map<std::string, std::string>& in_file,
                                     const std::string& source,
                                     bool incomplete) {
  std::vector<std::string> absent;
  const auto index = distckpt::parse_json(index_text, source);
  const auto& weight_map = distckpt::json_at(index, "weight_map", source);
  for (const auto& [tensor, value] : weight_map.items()) {
    const auto file = distckpt::json_string(value, tensor, source);
    const auto found = in_file.find(tensor);
    if (found == in_file.end()) {
      require(incomplete, ErrorKind::kCorrupt, "{}: says that {} is in {}, but no file has it",
              source, tensor, file);
      absent.push_back(tensor);
      continue;
    }
    require(found->second == file, ErrorKind::kCorrupt,
            "{}: says that {} is in {}, but it is in {}", source, tensor, file, found->second);
  }
  for (const auto& [tensor, file] : in_file) {
    require(weight_map.contains(tensor), ErrorKind::kCorrupt,
            "{}: does not list {}, which is in {}", source, tensor, file);
  }
  return absent;
}

}  // namespace ferry::converter
