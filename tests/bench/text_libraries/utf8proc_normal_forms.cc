// Normal forms and lower case by utf8proc in place of ours, for
// docs/decisions/regex_and_unicode.md: programs that link this file before rollout/text find it
// first.
#include <utf8proc.h>

#include <cstdlib>

#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {

std::string normalize(std::string_view text, NormalForm form) {
  const bool composed = form == NormalForm::kNfc || form == NormalForm::kNfkc;
  const bool compatible = form == NormalForm::kNfkc || form == NormalForm::kNfkd;
  const int options = UTF8PROC_STABLE | (composed ? UTF8PROC_COMPOSE : UTF8PROC_DECOMPOSE) |
                      (compatible ? UTF8PROC_COMPAT : 0);
  utf8proc_uint8_t* found = nullptr;
  const auto size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                 static_cast<utf8proc_ssize_t>(text.size()), &found,
                                 static_cast<utf8proc_option_t>(options));
  std::string normalized(reinterpret_cast<const char*>(found), static_cast<std::size_t>(size));
  std::free(found);
  return normalized;
}

std::string lowercase(std::string_view text) {
  std::string lower;
  for (std::size_t at = 0; at < text.size();) {
    const auto c = static_cast<utf8proc_int32_t>(next_code_point(text, at));
    append_utf8(static_cast<char32_t>(utf8proc_tolower(c)), lower);
  }
  return lower;
}

}  // namespace ferry::rollout::text
