// The families that are known, by what config.json calls them.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "converter/families/family.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

// The model_type of each, once.
std::vector<std::string_view> known_families();

// Null if it is not known.
const Family* known_family(std::string_view model_type);
// Throws Error(kLayout) that lists the known ones.
const Family& find_family(std::string_view model_type);

// The same, and for other names the family of models of which nothing is known: it passes through.
const Family& family_of(std::string_view model_type);
// The same by what a config.json says; families share a model_type where `architectures` (null if
// it has none) tells them apart.
const Family& family_of(std::string_view model_type, const nlohmann::json* architectures);

// The name in transformers of a module or parameter that has this one in files.
std::string module_name(const Family& family, std::string_view file_name);
// The names that files may have for a module or parameter of transformers, or of one of its older
// releases, whose names were those of files.
std::vector<std::string> file_names(const Family& family, std::string_view module_name);
// The one of them that a tensor has in files, of those that state_dict() of transformers' modules
// names so; a name that files have stays.
std::string file_name(const Family& family, std::string_view module_name);
// The name in files of a tensor that a model without its head names otherwise: files of its own
// leave out transformers' base_model_prefix ("layers.0.mlp.up_proj.weight"). Nothing for a name
// that files have, or that is of no such tensor.
std::optional<std::string> name_with_prefix(const Family& family, std::string_view name);

inline constexpr std::string_view kLayerMark = "{l}";

// `text` with the mark replaced by a number; as it is where it has no mark.
std::string fill_in(std::string_view text, std::string_view mark, std::int64_t number);

// "self_attn.{q,k}_proj" -> "self_attn.q_proj", "self_attn.k_proj".
std::vector<std::string> expand_braces(std::string_view text);

// The row of a section that a name stands for, or the first of those, whether the model has it or
// not; null: it is another section's.
const models::ParameterRow* row_of(const models::ParameterSection& section, const HfName& name);

// Writes the family's name into a configuration of one of its models, and what it says of all.
void set_family(models::TransformerConfig& config, const Family& family);

// The family whose tensors a configuration without a name has: Megatron's arguments do not say it.
// Throws Error(kLayout) if no family has such models.
const Family& infer_family(const models::TransformerConfig& config);

}  // namespace ferry::converter
