#include "rollout/grammar/format.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "distckpt/base/error.h"
#include "rollout/grammar/json_schema.h"
#include "rollout/grammar/regex_expression.h"
#include "rollout/grammar/vocabulary.h"

namespace ferry::rollout::grammar {
namespace {

using nlohmann::ordered_json;

class FormatReader {
 public:
  explicit FormatReader(const text::Tokenizer& tokenizer)
      : added_tokens_(tokenizer.added_tokens()) {}

  Rules read(const ordered_json& format) {
    const auto first = rules_.declare();
    rules_.define(first, expression(format));
    return std::move(rules_);
  }

 private:
  ExpressionPtr expression(const ordered_json& format) {
    const auto type = format.at("type").get<std::string>();
    if (type == "const_string") return with_added_tokens(format.at("value").get<std::string>());
    if (type == "regex") return regex_expression(format.at("pattern").get<std::string>());
    if (type == "json_schema")
      return json_schema(format.at("json_schema"), format.value("at", ""), rules_);
    if (type == "any_text") return text_without(format.at("exclude").get<std::string>(), rules_);
    if (type == "optional") return optional(expression(format.at("content")));
    if (type == "star") return star(expression(format.at("content")));
    require(type == "sequence" || type == "or", ErrorKind::kUsage, "format: there is no type {}",
            type);
    std::vector<ExpressionPtr> elements;
    for (const auto& one : format.at("elements")) elements.push_back(expression(one));
    return type == "or" ? choice(std::move(elements)) : sequence(std::move(elements));
  }

  ExpressionPtr with_added_tokens(std::string_view text) const {
    std::string marked;
    while (!text.empty()) {
      std::string_view longest;
      for (const auto& token : added_tokens_)
        if (text.starts_with(token) && token.size() > longest.size()) longest = token;
      if (!longest.empty()) marked += kAddedToken;
      const auto part = text.substr(0, longest.empty() ? 1 : longest.size());
      marked += part;
      text.remove_prefix(part.size());
    }
    return literal(std::move(marked));
  }

  std::vector<std::string> added_tokens_;
  Rules rules_;
};

}  // namespace

Rules read_format(std::string_view json, const text::Tokenizer& tokenizer) {
  try {
    return FormatReader(tokenizer).read(ordered_json::parse(json));
  } catch (const nlohmann::json::exception& error) {
    throw Error(ErrorKind::kUsage, fmt::format("format: {}", error.what()));
  }
}

}  // namespace ferry::rollout::grammar
