// The regular expressions of tokenizers, as Oniguruma understands them in Ruby's syntax: a
// backtracking matcher over UTF-8 whose sets of characters are those of unicode_tables.h, since no
// library at hand has the Unicode version of the tokenizers package. What it does not know (back
// references, look-behind, POSIX brackets, case folding beyond ASCII) it refuses by name.
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
  // Throws Error(kUsage) that names what is not supported, and where.
  explicit Regex(std::string_view pattern);

  // What a search needs and keeps: one for each thread.
  struct Frame {
    std::uint32_t pc = 0;
    std::size_t at = 0;
    std::size_t least = 0;  // a repetition gives characters back until here
    bool lazy = false;      // the repetition at `pc` may take `least` characters more
  };
  using Stack = std::vector<Frame>;

  // The first match at or behind `from`. `text` is valid UTF-8. Throws Error(kUsage) where the
  // search takes more than ten million steps back, as Oniguruma gives up.
  std::optional<Match> find(std::string_view text, std::size_t from, Stack& stack) const;

 private:
  friend class RegexCompiler;

  enum class Op : std::uint8_t {
    kByte,          // a character of ASCII: argument
    kSet,           // a character of sets_[argument]
    kRepeat,        // `min` to `max` of sets_[argument], as many as possible
    kLazy,          // as few as possible
    kAtomicRepeat,  // as many as possible, none given back
    kSplit,         // goes on at pc + 1, and at `argument` if that fails
    kJump,          // to `argument`
    kLookAhead,     // what lies before `argument` matches here
    kLookAheadNot,
    kAtomic,  // matches what lies before `argument`, once
    kLineBegin,
    kLineEnd,
    kTextBegin,
    kTextEnd,
    kAccept,
  };
  // First bytes with which what follows can match; the last bit is the end of the text.
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
