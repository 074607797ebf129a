// The regular expressions of tokenizers, with Oniguruma's meaning of Ruby's syntax: a backtracking
// matcher over UTF-8 with the sets of characters of unicode_tables.h. No library of a distribution
// has the Unicode of the tokenizers package (docs/decisions/regex_and_unicode.md). Back references,
// look-behind, POSIX brackets and case folding beyond ASCII are refused by name.
#pragma once

#include <bitset>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {

struct Match {
  std::size_t begin = 0;
  std::size_t end = 0;
};

class Regex {
 public:
  // Throws Error(kUsage) that names an unsupported part and its byte.
  explicit Regex(std::string_view pattern);

  // The memory of searches, for one thread at a time.
  struct Frame {
    std::uint32_t pc = 0;
    std::size_t at = 0;
    std::size_t least = 0;  // a greedy repetition gives characters back down to here
    bool lazy = false;      // the repetition at `pc` may take up to `least` more characters
  };
  using Stack = std::vector<Frame>;

  // The first match at or behind `from`. `text` is valid UTF-8. Throws Error(kUsage) if one match
  // takes more than ten million steps back, which is Oniguruma's limit.
  std::optional<Match> find(std::string_view text, std::size_t from, Stack& stack) const;

 private:
  friend class RegexCompiler;

  enum class Op : std::uint8_t {
    kByte,          // the ASCII character `argument`
    kSet,           // a character of sets_[argument]
    kRepeat,        // `min` to `max` of sets_[argument], as many as possible
    kLazy,          // as few as possible
    kAtomicRepeat,  // as many as possible, none given back
    kSplit,         // goes on at pc + 1, and at `argument` if that fails
    kJump,          // to `argument`
    kLookAhead,     // the instructions up to `argument` match here
    kLookAheadNot,
    kAtomic,  // takes the first match of the instructions up to `argument`
    kLineBegin,
    kLineEnd,
    kTextBegin,
    kTextEnd,
    kAccept,
  };
  // First bytes of the matches from an instruction on; the last bit is the end of the text.
  using FirstBytes = std::bitset<257>;
  struct Instruction {
    Op op = Op::kAccept;
    std::uint32_t argument = 0;
    std::uint32_t min = 0;
    std::uint32_t max = 0;
    FirstBytes first{};
  };

  bool can_begin(std::uint32_t pc, std::string_view text, std::size_t at) const {
    return program_[pc].first[at < text.size() ? static_cast<unsigned char>(text[at]) : 256];
  }
  // The end of the match that begins at `at`, from instruction `pc` to a kAccept.
  std::optional<std::size_t> match(std::string_view text,
                                   std::uint32_t pc,
                                   std::size_t at,
                                   Stack& stack,
                                   std::size_t& steps) const;

  std::string pattern_;
  std::vector<CodePointSet> sets_;
  std::vector<Instruction> program_;
};

}  // namespace ferry::rollout::text
