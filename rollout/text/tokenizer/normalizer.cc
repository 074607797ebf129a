#include "rollout/text/tokenizer/normalizer.h"

#include "rollout/text/regex/pattern.h"
#include "rollout/text/tokenizer/tokenizer_file.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {
namespace {

std::string strip(std::string_view text, bool left, bool right) {
  if (left) text.remove_prefix(white_space_prefix(text));
  if (right) text.remove_suffix(white_space_suffix(text));
  return std::string(text);
}

using Step = std::function<std::string(std::string_view)>;

void add(const Component& part, std::vector<Step>& steps) {
  const auto form = [&](NormalForm to) {
    steps.push_back([to](std::string_view text) { return normalize(text, to); });
  };
  if (part.type() == "Sequence") {
    for (const auto& inner : part.sequence("normalizers")) add(inner, steps);
  } else if (part.type() == "NFC") {
    form(NormalForm::kNfc);
  } else if (part.type() == "NFD") {
    form(NormalForm::kNfd);
  } else if (part.type() == "NFKC") {
    form(NormalForm::kNfkc);
  } else if (part.type() == "NFKD") {
    form(NormalForm::kNfkd);
  } else if (part.type() == "Lowercase") {
    steps.emplace_back(lowercase);
  } else if (part.type() == "Strip") {
    steps.push_back([left = part.flag("strip_left", true), right = part.flag("strip_right", true)](
                        std::string_view text) { return strip(text, left, right); });
  } else if (part.type() == "Prepend") {
    steps.push_back([prefix = part.string("prepend")](std::string_view text) {
      return text.empty() ? std::string() : prefix + std::string(text);
    });
  } else if (part.type() == "Replace") {
    steps.push_back([pattern = Pattern(part.pattern("pattern")), content = part.string("content")](
                        std::string_view text) { return pattern.replace(text, content); });
  } else {
    part.refuse_type();
  }
}

}  // namespace

Normalizer::Normalizer(const nlohmann::json& settings, const std::string& where) {
  if (!settings.is_null()) add(Component(settings, where), steps_);
}

std::string Normalizer::normalize(std::string_view text) const {
  std::string normalized(text);
  for (const auto& step : steps_) normalized = step(normalized);
  return normalized;
}

}  // namespace ferry::rollout::text
