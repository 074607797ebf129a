// Regex by Oniguruma, the library that the tokenizers package uses, in place of our matcher, for
// docs/decisions/regex_and_unicode.md: programs that link this file before rollout/text find it
// first.
#include <oniguruma.h>

#include <deque>
#include <string>

#include "distckpt/base/error.h"
#include "rollout/text/regex/regex.h"

namespace ferry::rollout::text {
namespace {

std::deque<regex_t*>& compiled() {
  static std::deque<regex_t*> codes;
  return codes;
}

const OnigUChar* bytes(const char* text) {
  return reinterpret_cast<const OnigUChar*>(text);
}

}  // namespace

// Regex calls this a friend: it alone sees the members. The number of the code stands in the only
// instruction of the program.
class RegexCompiler {
 public:
  static void compile(std::string_view pattern, std::vector<Regex::Instruction>& program) {
    regex_t* code = nullptr;
    OnigErrorInfo info;
    OnigEncoding encodings[] = {ONIG_ENCODING_UTF8};
    onig_initialize(encodings, 1);
    const auto error =
        onig_new(&code, bytes(pattern.data()), bytes(pattern.data() + pattern.size()),
                 ONIG_OPTION_NONE, ONIG_ENCODING_UTF8, ONIG_SYNTAX_RUBY, &info);
    require(error == ONIG_NORMAL, ErrorKind::kUsage, "regular expression {}: error {}", pattern,
            error);
    program.push_back({.argument = static_cast<std::uint32_t>(compiled().size())});
    compiled().push_back(code);
  }
};

Regex::Regex(std::string_view pattern) : pattern_(pattern) {
  RegexCompiler::compile(pattern, program_);
}

std::optional<Match> Regex::find(std::string_view text, std::size_t from, Stack&) const {
  thread_local auto* const found = onig_region_new();
  const auto* const begin = bytes(text.data());
  const auto* const end = begin + text.size();
  const auto at = onig_search(compiled()[program_[0].argument], begin, end, begin + from, end,
                              found, ONIG_OPTION_NONE);
  if (at == ONIG_MISMATCH) return std::nullopt;
  require(at >= 0, ErrorKind::kUsage, "regular expression {}: error {}", pattern_, at);
  return Match{.begin = static_cast<std::size_t>(found->beg[0]),
               .end = static_cast<std::size_t>(found->end[0])};
}

}  // namespace ferry::rollout::text
