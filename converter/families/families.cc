#include "converter/families/families.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

// Each file's families. Visits them until `visit` says true of one, which is returned.
template <typename Visit>
const Family* find_if(const Visit& visit) {
  for (const auto families : {
           kLlamaFamilies,
           kHybridFamilies,
           kErnieFamilies,
           kGemmaFamilies,
           kGlm4Families,
           kGraniteFamilies,
           kPhiFamilies,
           kSmolFamilies,
           kOlmoFamilies,
           kMixtralFamilies,
           kQwenMoeFamilies,
           kOlmoeFamilies,
           kMiniMaxFamilies,
           kBailingFamilies,
           kDeepSeekFamilies,
           kGlmFamilies,
           kGptOssFamilies,
           kNemotronFamilies,
       }) {
    for (const auto& family : families) {
      if (visit(family)) return &family;
    }
  }
  return nullptr;
}

// `name` with `with` for `part`, which is its beginning, or may be anywhere if a dot begins it.
std::optional<std::string> replace_part(std::string_view name,
                                        std::string_view part,
                                        std::string_view with) {
  const auto at = name.find(part);
  if (at == name.npos || (at > 0 && !part.starts_with('.'))) return std::nullopt;
  return fmt::format("{}{}{}", name.substr(0, at), with, name.substr(at + part.size()));
}

// True if files have such a name: of a layer, of what is before or behind all layers, of a tower.
bool is_file_name(const HfNames& names, std::string_view name) {
  const auto begins = [&](std::string_view with) { return name.starts_with(with); };
  const auto is = [&](const HfName& one) { return name == one.hf; };
  return begins(names.layer.substr(0, names.layer.find(kLayerMark))) ||
         std::ranges::any_of(names.first, is) || std::ranges::any_of(names.last, is) ||
         std::ranges::any_of(names.carried, begins);
}

// Parts of a model that most families lack.
bool has_rare_parts(const models::TransformerConfig& config) {
  return config.rotary_interleaved || config.layernorm_zero_centered_gamma ||
         config.qk_layernorm_full || config.post_norm != models::PostNorm::kNone ||
         config.is_sparse() || config.softmax_offset || config.is_hybrid_model() ||
         !config.no_rope_freq.empty();
}

}  // namespace

std::vector<std::string_view> known_families() {
  std::vector<std::string_view> known;
  find_if([&](const Family& family) {
    known.push_back(family.model_type);
    return false;
  });
  return known;
}

const Family* known_family(std::string_view model_type) {
  return find_if([&](const Family& family) { return family.model_type == model_type; });
}

const Family& find_family(std::string_view model_type) {
  const auto* found = known_family(model_type);
  if (found != nullptr) return *found;
  throw Error(ErrorKind::kLayout, fmt::format("the model_type \"{}\" is not known", model_type),
              fmt::format("known are {}; docs/adding_a_family.md says how to add a family",
                          fmt::join(known_families(), ", ")));
}

const Family& family_of(std::string_view model_type) {
  static constexpr HfNames kUnmappedNames{};
  static constexpr Family kUnknown{.model_type = "",
                                   .names = &kUnmappedNames,
                                   .traits = {.not_computed = "a model_type that is not known"},
                                   .passes_through = true};
  const auto* found = known_family(model_type);
  return found != nullptr ? *found : kUnknown;
}

const Family& family_of(std::string_view model_type, const nlohmann::json* architectures) {
  const auto* found = find_if([&](const Family& family) {
    return !family.architecture.empty() && family.shared_model_type == model_type &&
           architectures != nullptr && architectures->is_array() &&
           std::ranges::any_of(*architectures, [&](const nlohmann::json& one) {
             return one.is_string() && one.get_ref<const std::string&>() == family.architecture;
           });
  });
  return found != nullptr ? *found : family_of(model_type);
}

std::string module_name(const Family& family, std::string_view file_name) {
  for (const auto& rule : family.names->modules) {
    if (auto renamed = replace_part(file_name, rule.file, rule.module)) return std::move(*renamed);
  }
  return std::string(file_name);
}

std::vector<std::string> file_names(const Family& family, std::string_view module_name) {
  std::vector<std::string> names;
  for (const auto& rule : family.names->modules) {
    if (auto renamed = replace_part(module_name, rule.module, rule.file))
      names.push_back(std::move(*renamed));
  }
  names.emplace_back(module_name);
  return names;
}

std::string file_name(const Family& family, std::string_view module_name) {
  std::string name(module_name);
  std::size_t longest = 0;  // of the beginnings that fit: "model.vision_tower.vision_model."
  for (const auto& rule : family.names->modules) {
    if (rule.module.size() <= longest) continue;
    auto renamed = replace_part(module_name, rule.module, rule.file);
    if (!renamed || !is_file_name(*family.names, *renamed)) continue;
    name = std::move(*renamed);
    longest = rule.module.size();
  }
  return name;
}

std::optional<std::string> name_with_prefix(const Family& family, std::string_view name) {
  if (family.passes_through || is_file_name(*family.names, name)) return std::nullopt;
  for (auto& full : file_names(family, fmt::format("model.{}", name))) {
    if (is_file_name(*family.names, full)) return std::move(full);
  }
  return std::nullopt;
}

std::string fill_in(std::string_view text, std::string_view mark, std::int64_t number) {
  const auto at = text.find(mark);
  if (at == std::string_view::npos) return std::string(text);
  return fmt::format("{}{}{}", text.substr(0, at), number, text.substr(at + mark.size()));
}

std::vector<std::string> expand_braces(std::string_view text) {
  const auto open = text.find('{');
  if (open == std::string_view::npos) return {std::string(text)};
  const auto close = text.find('}', open);
  std::vector<std::string> names;
  auto choices = text.substr(open + 1, close - open - 1);
  while (true) {
    const auto comma = choices.find(',');
    names.push_back(fmt::format("{}{}{}", text.substr(0, open), choices.substr(0, comma),
                                text.substr(close + 1)));
    if (comma == std::string_view::npos) return names;
    choices.remove_prefix(comma + 1);
  }
}

const models::ParameterRow* row_of(const models::ParameterSection& section, const HfName& name) {
  const auto first = expand_braces(name.parameter).front();
  const auto found = std::ranges::find_if(section.rows, [&](const models::ParameterRow& row) {
    return row.name == first && (name.when == models::when::kAlways || name.when == row.when);
  });
  return found == section.rows.end() ? nullptr : &*found;
}

void set_family(models::TransformerConfig& config, const Family& family) {
  config.family = family.model_type;
  config.traits = family.traits;
}

const Family& infer_family(const models::TransformerConfig& config) {
  const auto* found = find_if([&](const Family& family) {
    return family.describes != nullptr && family.rare == has_rare_parts(config) &&
           family.describes(config);
  });
  require(found != nullptr, ErrorKind::kLayout,
          "no known family has models of the kind that the checkpoint's arguments describe");
  return *found;
}

}  // namespace ferry::converter
