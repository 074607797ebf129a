// Schemas before they are compiled: their keywords, references, and several that hold together.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace ferry::rollout::grammar {

using nlohmann::ordered_json;

[[noreturn]] void refuse_schema(std::string_view keyword,
                                const std::string& at,
                                std::string_view why = "is not supported");

// The document that a schema is a part of, and how much was made of it: parts that refer to each
// other many times over would otherwise take for ever, and memory without end.
class Document {
 public:
  explicit Document(const ordered_json& root) : root_(root) {}
  const ordered_json& root() const { return root_; }

  // Called before `schema` is copied. Throws when all that was copied is too much.
  void charge(const ordered_json& schema, const std::string& at);
  void charge(std::size_t num_values, const std::string& at);

 private:
  const ordered_json& root_;
  std::size_t num_values_ = 0;
};

// Throws for a keyword that is neither supported nor an annotation.
void check_keywords(const ordered_json& schema, const std::string& at);
bool is_annotation(std::string_view keyword);

// The schema that "#/..." names, in the document.
const ordered_json& resolve(const ordered_json& root,
                            const std::string& ref,
                            const std::string& at);

// One schema for two that hold together. Throws where that takes more than a union of keywords.
ordered_json merge(Document& document,
                   const ordered_json& one,
                   const ordered_json& other,
                   const std::string& at,
                   int depth = 0);

// A document whose own $ref and allOf are keywords beside the others; those of its parts stay.
ordered_json united(const ordered_json& root);

// True if no value is valid by both, as far as types, constants and members that both require say.
bool are_disjoint(Document& document, const ordered_json& one, const ordered_json& other);

// The strings of a format: a regular expression, and the lengths that they have.
struct StringFormat {
  const char* pattern;
  std::uint32_t least;
  std::uint32_t most;
};
// Null for a format that is not supported.
const StringFormat* string_format(std::string_view format);
// JSON Schema says what strings of the format are; others are annotations.
bool is_asserted(std::string_view format);

}  // namespace ferry::rollout::grammar
