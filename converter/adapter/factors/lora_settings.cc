#include "converter/adapter/factors/lora_settings.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <optional>
#include <string_view>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/source_tree.h"
#include "rollout/text/regex/linear_regex.h"

namespace ferry::converter {

using nlohmann::ordered_json;

namespace {

// True if a pattern of PEFT matches the end of a name, from a dot or its beginning on; nothing for
// a pattern that is not understood.
std::optional<bool> is_end_of(const std::string& pattern, const std::string& name) {
  try {
    return rollout::text::LinearRegex("(?:.*\\.)?(?:" + pattern + ")").matches(name);
  } catch (const Error&) {
    return std::nullopt;
  }
}

// peft/tuners/lora/layer.py, update_layer: other ways to begin (PiSSA, OLoRA, CorDA, LoftQ,
// LoRA-GA) take the first product of the factors out of the base's weight, here and wherever PEFT
// loads it.
void require_whole_base(const ordered_json& init, const std::string& source) {
  constexpr std::array<std::string_view, 4> kLeaveIt{"gaussian", "eva", "orthogonal", "mica"};
  if (!init.is_string()) return;
  const auto name = init.get<std::string>();
  if (std::ranges::find(kLeaveIt, name) != kLeaveIt.end()) return;
  throw Error(
      ErrorKind::kLayout,
      fmt::format("{}: init_lora_weights: \"{}\" changes the base's weights, and the adapter "
                  "is not one of the base as it is",
                  source, name),
      "PEFT saves the same change as an adapter of the base: "
      "save_pretrained(..., path_initial_model_for_weight_conversion=...)");
}

}  // namespace

std::filesystem::path adapter_weights(const std::filesystem::path& folder) {
  if (!distckpt::source_exists(folder / kAdapterWeights) &&
      distckpt::source_exists(folder / "adapter_model.bin")) {
    throw Error(ErrorKind::kLayout,
                fmt::format("{}: has adapter_model.bin alone, which is not read", folder.string()),
                "PEFT's save_pretrained writes adapter_model.safetensors unless told otherwise");
  }
  return folder / kAdapterWeights;
}

float lora_scaling(double alpha, double divisor, const std::string& source) {
  const auto scaling = static_cast<float>(alpha / divisor);
  require(std::isfinite(alpha) && alpha > 0 && std::isfinite(scaling) && scaling > 0,
          ErrorKind::kCorrupt, "{}: an alpha of {} makes the factor {}", source, alpha, scaling);
  return scaling;
}

bool is_named(std::string_view name, std::string_view end) {
  if (!name.ends_with(end)) return false;
  return name.size() == end.size() || name[name.size() - end.size() - 1] == '.';
}

AdapterKey LoraSettings::parse_key(std::string_view name, const std::string& source) const {
  static constexpr std::string_view kParts[] = {"lora_A",           "lora_B",
                                                "lora_embedding_A", "lora_embedding_B",
                                                "base_layer",       "lora_magnitude_vector",
                                                kTokenRows};
  require(name.starts_with(kPeftPrefix), ErrorKind::kLayout, "{}: {}: does not begin with {}",
          source, name, kPeftPrefix);
  name.remove_prefix(kPeftPrefix.size());
  auto rest = name;
  for (const std::string_view ending : {".weight", ".default"})
    if (rest.ends_with(ending)) rest.remove_suffix(ending.size());
  const auto dot = rest.rfind('.');
  const bool is_part = dot != rest.npos && dot > 0 &&
                       std::ranges::find(kParts, rest.substr(dot + 1)) != std::end(kParts);
  if (!is_part && is_set("modules_to_save")) return {.module = std::string(name)};
  require(is_part, ErrorKind::kLayout, "{}: {}{}: is no factor of LoRA, and not merged", source,
          kPeftPrefix, name);
  const auto part = rest.substr(dot + 1);
  rest = rest.substr(0, dot);
  if (constexpr std::string_view kWrapper = ".token_adapter"; rest.ends_with(kWrapper))
    rest.remove_suffix(kWrapper.size());
  return {.module = std::string(rest), .part = std::string(part)};
}

LoraSettings::LoraSettings(const std::filesystem::path& path)
    : LoraSettings(distckpt::read_text(path), path.string()) {}

LoraSettings::LoraSettings(std::string text, std::string source)
    : source_(std::move(source)), text_(std::move(text)) {
  config_ = distckpt::parse_ordered_json(text_, source_);
  require(config_.is_object(), ErrorKind::kCorrupt, "{}: is no object", source_);
  const auto type = config_.value("peft_type", ordered_json());
  require(type == "LORA", ErrorKind::kLayout, "{}: peft_type: {}, expected LORA", source_,
          type.dump());
  for (const auto* key :
       {"fan_in_fan_out", "layer_replication", "lora_bias", "use_qalora", "use_bdlora",
        "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config"})
    refuse(key);
  require_whole_base(config_.value("init_lora_weights", ordered_json(true)), source_);
  const auto bias = config_.value("bias", ordered_json("none"));
  require(bias == "none", ErrorKind::kLayout, "{}: bias: {} is not merged, only none", source_,
          bias.dump());
  if (!is_set("target_parameters")) return;
  const auto& names = config_.at("target_parameters");
  const bool good = names.is_array() && std::ranges::all_of(names, [](const ordered_json& name) {
                      return name.is_string();
                    });
  require(good, ErrorKind::kCorrupt, "{}: target_parameters: {} is no list of names", source_,
          names.dump());
  target_parameters_ = names.get<std::vector<std::string>>();
}

void LoraSettings::refuse(const std::string& key) const {
  require(!is_set(key), ErrorKind::kLayout, "{}: {}: {} is not handled", source_, key,
          is_set(key) ? config_.at(key).dump() : "");
}

// peft/utils/other.py, set_additional_trainable_modules: a list is that of the input embedding.
std::vector<std::int64_t> LoraSettings::token_indices(const std::string& module) const {
  auto found = config_.value("trainable_token_indices", ordered_json());
  if (found.is_object()) {
    const auto by_name = found;
    found = nullptr;
    for (const auto& [name, indices] : by_name.items())
      if (is_named(module, name)) found = indices;
  }
  const auto is_index = [](const ordered_json& one) { return one.is_number_integer(); };
  require(found.is_array() && std::ranges::all_of(found, is_index), ErrorKind::kCorrupt,
          "{}: trainable_token_indices: {} is no list of tokens of {}", source_, found.dump(),
          module);
  return found.get<std::vector<std::int64_t>>();
}

float LoraSettings::scaling(const std::string& module, std::int64_t rank) const {
  // Patterns see a parameter's whole name, also where the parameter is a module's weight.
  const auto weight = module + ".weight";
  const bool is_parameter = std::ranges::any_of(
      target_parameters_, [&](const auto& name) { return is_named(weight, name); });
  const auto& adapted = is_parameter ? weight : module;
  const auto alpha = number("lora_alpha", "alpha_pattern", adapted);
  const auto r = number("r", "rank_pattern", adapted);
  require(r == static_cast<double>(rank), ErrorKind::kCorrupt,
          "{}: {}: the rank is {}, its factors have {}", source_, module, r, rank);
  return lora_scaling(alpha, is_set("use_rslora") ? std::sqrt(r) : r, source_);
}

bool LoraSettings::is_set(const std::string& key) const {
  const auto value = config_.find(key);
  if (value == config_.end() || value->is_null()) return false;
  if (value->is_boolean()) return value->get<bool>();
  return !value->empty();
}

// peft/utils/other.py, get_pattern_key: the first pattern that matches the end of the name.
double LoraSettings::number(const std::string& key,
                            const std::string& patterns,
                            const std::string& module) const {
  const auto found = config_.find(patterns);
  if (found != config_.end() && found->is_object()) {
    for (const auto& [pattern, value] : found->items()) {
      const auto matches = is_end_of(pattern, module);
      require(matches.has_value(), ErrorKind::kLayout,
              "{}: {}: \"{}\" is no pattern that is understood", source_, patterns, pattern);
      if (*matches) return positive(value, patterns);
    }
  }
  return positive(config_.value(key, ordered_json()), key);
}

double LoraSettings::positive(const ordered_json& value, const std::string& key) const {
  require(value.is_number() && value.get<double>() > 0, ErrorKind::kCorrupt,
          "{}: {}: {} is no positive number", source_, key, value.dump());
  return value.get<double>();
}

}  // namespace ferry::converter
