// A parsed tokenizer.json: the vocabulary and the merges, which are most of it, as flat lists, the
// rest as JSON. A key that occurs twice is an error.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ferry::rollout::text {

using TokenId = std::int32_t;
inline constexpr TokenId kNoToken = -1;

struct TokenizerFile {
  std::string source{};
  nlohmann::json settings{};                             // without model.vocab and model.merges
  std::vector<std::pair<std::string, TokenId>> vocab{};  // in the file's order
  std::vector<std::pair<std::string, std::string>> merges{};  // by rank
  bool has_vocab = false, has_merges = false;                 // an object, an array
  bool ranked_by_token = false;  // the rank of a merge is the id of the token that it makes
};

// Throws Error(kCorrupt) that names the source and the defect.
TokenizerFile parse_tokenizer_file(std::string_view text, std::string_view source);

// A part of `settings` (a normalizer, a decoder ...): members by name, with errors that name the
// place if one is missing.
class Component {
 public:
  Component(const nlohmann::json& settings, std::string where);

  const std::string& where() const { return where_; }
  const std::string& type() const { return type_; }
  [[noreturn]] void refuse(std::string_view what) const;  // "<where>: <what> is not supported"
  [[noreturn]] void refuse_type() const;

  bool flag(std::string_view key, bool otherwise) const;
  std::string string(std::string_view key) const;
  std::string string(std::string_view key, std::string_view otherwise) const;
  char32_t character(std::string_view key) const;
  std::uint32_t count(std::string_view key) const;
  std::vector<Component> sequence(std::string_view key) const;
  const nlohmann::json& member(std::string_view key) const;
  // {"String": x} or {"Regex": x} as (whether it is a Regex, x).
  std::pair<bool, std::string> pattern(std::string_view key) const;

 private:
  const nlohmann::json* find(std::string_view key) const;

  const nlohmann::json* settings_;
  std::string where_;
  std::string type_;
};

}  // namespace ferry::rollout::text
