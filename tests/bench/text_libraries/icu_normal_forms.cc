// Normal forms and lower case by ICU in place of ours, for docs/decisions/regex_and_unicode.md:
// programs that link this file before rollout/text find it first.
#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>

#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {

std::string normalize(std::string_view text, NormalForm form) {
  const bool composed = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  const bool compatible = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  UErrorCode status = U_ZERO_ERROR;
  const auto* const normalizer = icu::Normalizer2::getInstance(
      nullptr, compatible ? "nfkc" : "nfc", composed ? UNORM2_COMPOSE : UNORM2_DECOMPOSE, status);
  std::string normalized;
  icu::StringByteSink<std::string> sink(&normalized, static_cast<std::int32_t>(text.size()));
  normalizer->normalizeUTF8(0, {text.data(), static_cast<std::int32_t>(text.size())}, sink, nullptr,
                            status);
  return normalized;
}

std::string lowercase(std::string_view text) {
  std::string lower;
  for (std::size_t at = 0; at < text.size();) {
    const auto c = static_cast<UChar32>(next_code_point(text, at));
    append_utf8(static_cast<char32_t>(u_tolower(c)), lower);
  }
  return lower;
}

}  // namespace ferry::rollout::text
