// Schemas before they are compiled: their keywords, references, and several that hold together.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace ferry::rollout::grammar {

using nlohmann::ordered_json;

[[noreturn]] void refuse_schema(std::string_view keyword,
                                const std::string& at,
                                std::string_view why = "is not supported");

// Throws for a keyword that is neither supported nor an annotation.
void check_keywords(const ordered_json& schema, const std::string& at);
bool is_annotation(std::string_view keyword);

// The schema that "#/..." names, in the document.
const ordered_json& resolve(const ordered_json& root,
                            const std::string& ref,
                            const std::string& at);

// One schema for two that hold together. Throws where that takes more than a union of keywords.
ordered_json merge(const ordered_json& root,
                   const ordered_json& one,
                   const ordered_json& other,
                   const std::string& at,
                   int depth = 0);

// True if no value is valid by both, as far as types, constants and members that both require say.
bool are_disjoint(const ordered_json& root, const ordered_json& one, const ordered_json& other);

// The schema of a format, as a regular expression; null for an unknown one.
const char* pattern_of_format(std::string_view format);

}  // namespace ferry::rollout::grammar
