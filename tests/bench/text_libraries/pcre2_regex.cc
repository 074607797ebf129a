// Regex by PCRE2 in place of our matcher, for docs/decisions/regex_and_unicode.md: programs that
// link this file before rollout/text find it first.
//
//   FERRY_PCRE2=native   the pattern as it stands, with PCRE2's own Unicode (default)
//   FERRY_PCRE2=tables   the pattern as our parser reads it, every class written out as ranges
#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include <cstdlib>
#include <deque>
#include <string>

#include "distckpt/base/error.h"
#include "rollout/text/regex/regex.h"
#include "rollout/text/regex/regex_tree.h"

namespace ferry::rollout::text {
namespace {

using Kind = RegexNode::Kind;

std::string pattern_of(const RegexNode& node) {
  std::string inside;
  for (const auto& child : node.children) {
    if (node.kind == Kind::kChoice && !inside.empty()) inside += '|';
    inside += pattern_of(child);
  }
  switch (node.kind) {
    case Kind::kSet:
      for (const auto& [first, last] : node.set.ranges()) {
        inside += fmt::format("\\x{{{:X}}}-\\x{{{:X}}}", static_cast<std::uint32_t>(first),
                              static_cast<std::uint32_t>(last));
      }
      return inside.empty() ? "(?!)" : "[" + inside + "]";
    case Kind::kSequence:
      return inside;
    case Kind::kChoice:
      return "(?:" + inside + ")";
    case Kind::kRepeat: {
      const auto most = node.max == RegexNode::kUnbounded ? "" : std::to_string(node.max);
      const auto* greed = node.greed == RegexNode::Greed::kLazy         ? "?"
                          : node.greed == RegexNode::Greed::kPossessive ? "+"
                                                                        : "";
      return fmt::format("(?:{}){{{},{}}}{}", inside, node.min, most, greed);
    }
    case Kind::kLookAhead:
      return "(?=" + inside + ")";
    case Kind::kLookAheadNot:
      return "(?!" + inside + ")";
    case Kind::kAtomic:
      return "(?>" + inside + ")";
    case Kind::kLineBegin:
      return "^";
    case Kind::kLineEnd:
      return "$";
    case Kind::kTextBegin:
      return "\\A";
    case Kind::kTextEnd:
      return "\\z";
  }
  return {};
}

std::deque<pcre2_code*>& compiled() {
  static std::deque<pcre2_code*> codes;
  return codes;
}

}  // namespace

// Regex calls this a friend: it alone sees the members. The number of the code stands in the only
// instruction of the program.
class RegexCompiler {
 public:
  static void compile(std::string_view pattern, std::vector<Regex::Instruction>& program) {
    const char* const mode = std::getenv("FERRY_PCRE2");
    const bool tables = mode != nullptr && std::string_view(mode) == "tables";
    const std::string text = tables ? pattern_of(parse_regex(pattern)) : std::string(pattern);
    int error = 0;
    std::size_t place = 0;
    const auto options = PCRE2_UTF | PCRE2_MULTILINE | (tables ? 0 : PCRE2_UCP);
    auto* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), options,
                               &error, &place, nullptr);
    require(code != nullptr, ErrorKind::kUsage, "regular expression {}: error {} at byte {}", text,
            error, place);
    require(pcre2_jit_compile(code, PCRE2_JIT_COMPLETE) == 0, ErrorKind::kUsage,
            "regular expression {}: cannot be compiled to machine code", text);
    program.push_back({.argument = static_cast<std::uint32_t>(compiled().size())});
    compiled().push_back(code);
  }
};

Regex::Regex(std::string_view pattern) : pattern_(pattern) {
  RegexCompiler::compile(pattern, program_);
}

std::optional<Match> Regex::find(std::string_view text, std::size_t from, Stack&) const {
  thread_local auto* const found = pcre2_match_data_create(64, nullptr);
  thread_local auto* const context = [] {
    auto* made = pcre2_match_context_create(nullptr);
    pcre2_jit_stack_assign(made, nullptr, pcre2_jit_stack_create(1 << 15, 1 << 26, nullptr));
    return made;
  }();
  const int count =
      pcre2_jit_match(compiled()[program_[0].argument], reinterpret_cast<PCRE2_SPTR>(text.data()),
                      text.size(), from, 0, found, context);
  if (count == PCRE2_ERROR_NOMATCH) return std::nullopt;
  require(count > 0, ErrorKind::kUsage, "regular expression {}: error {}", pattern_, count);
  const auto* const places = pcre2_get_ovector_pointer(found);
  return Match{.begin = places[0], .end = places[1]};
}

}  // namespace ferry::rollout::text
