#include "converter/stored/verl_lora.h"

#include <fmt/format.h>

#include <filesystem>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kLoraPart = ".lora_";
constexpr std::string_view kBaseLayer = ".base_layer";
constexpr std::string_view kTrainedWhole = ".modules_to_save.";

// verl/utils/checkpoint/fsdp_checkpoint_manager.py, _save_lora_train_meta, and the record of
// verl/trainer/sft_trainer.py, which is 0 where the configuration does not say a number.
LoraRecord read_record(const fs::path& path) {
  LoraRecord record{.source = path.string()};
  const auto fields = distckpt::parse_ordered_json(distckpt::read_text(path), record.source);
  require(fields.is_object(), ErrorKind::kCorrupt, "{}: is no object", record.source);
  const auto find = [&](const char* key) {
    auto value = fields.value(key, ordered_json());
    require(value.is_null() || value.is_number(), ErrorKind::kCorrupt, "{}: {}: {} is no number",
            record.source, key, value.dump());
    return value;
  };
  if (const auto rank = find("r"); !rank.is_null() && rank != 0) {
    require(rank.is_number_integer() && rank > 0, ErrorKind::kCorrupt, "{}: r: {} is no rank",
            record.source, rank.dump());
    record.rank = rank.get<std::int64_t>();
  }
  if (const auto alpha = find("lora_alpha"); !alpha.is_null() && alpha != 0)
    record.alpha = alpha.get<double>();
  const auto type = fields.value("task_type", ordered_json());
  require(type.is_null() || type.is_string(), ErrorKind::kCorrupt, "{}: task_type: {} is no name",
          record.source, type.dump());
  if (type.is_string()) record.task_type = type.get<std::string>();
  return record;
}

}  // namespace

bool is_lora_factor(std::string_view name) {
  return name.starts_with(kPeftPrefix) && name.find(kLoraPart) != name.npos;
}

bool is_adapter_key(std::string_view key) {
  return key.find(".adapter.") != key.npos;
}

void refuse_adapter(const Location& location, bool alone) {
  throw Error(
      ErrorKind::kUsage,
      fmt::format("{}: holds a LoRA adapter {}", location.folder.string(),
                  alone ? "without a model" : "beside the model, which would be taken without it"),
      std::string(kAdapterHint));
}

std::string name_in_base(std::string_view name, const std::string& source) {
  if (!name.starts_with(kPeftPrefix)) return std::string(name);
  require(name.find(kTrainedWhole) == name.npos, ErrorKind::kLayout,
          "{}: {}: was trained whole beside an adapter (modules_to_save), which is not read",
          source, name);
  std::string found(name.substr(kPeftPrefix.size()));
  for (auto at = found.find(kBaseLayer); at != found.npos; at = found.find(kBaseLayer, at)) {
    const auto end = at + kBaseLayer.size();
    if (end == found.size() || found[end] == '.') {
      found.erase(at, kBaseLayer.size());
    } else {
      at = end;
    }
  }
  return found;
}

std::optional<LoraRecord> find_lora_record(const Location& location) {
  const auto& files = location.folder;
  std::vector<fs::path> folders{files.has_filename() ? files : files.parent_path()};
  for (const auto* inner : {"dist_ckpt", "model"}) {
    if (folders.back().filename() == inner) folders.push_back(folders.back().parent_path());
  }
  for (const auto& folder : folders) {
    if (distckpt::source_exists(folder / kVerlLoraRecord))
      return read_record(folder / kVerlLoraRecord);
  }
  return std::nullopt;
}

}  // namespace ferry::converter
