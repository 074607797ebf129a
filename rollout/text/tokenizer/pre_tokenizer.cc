#include "rollout/text/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "rollout/text/regex/pattern.h"
#include "rollout/text/tokenizer/tokenizer_file.h"

namespace ferry::rollout::text {
namespace {

using Piece = Pieces::Piece;
using PreTokenizerStep = std::function<void(Pieces&)>;

constexpr std::string_view kGpt2 =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// The treatment of matches, which are the delimiters between pieces.
enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

Behavior behavior_of(const Component& part, std::string_view otherwise) {
  static constexpr std::pair<std::string_view, Behavior> kBehaviors[] = {
      {"Removed", Behavior::kRemoved},
      {"Isolated", Behavior::kIsolated},
      {"MergedWithPrevious", Behavior::kMergedWithPrevious},
      {"MergedWithNext", Behavior::kMergedWithNext},
      {"Contiguous", Behavior::kContiguous}};
  const auto name = part.string("behavior", otherwise);
  for (const auto& [known, behavior] : kBehaviors) {
    if (name == known) return behavior;
  }
  part.refuse(fmt::format("the behavior {}", name));
}

// Takes the parts of one piece, matches or not, and joins them by the behavior.
class Cutter {
 public:
  Cutter(std::vector<Piece>& pieces, Behavior behavior) : pieces_(pieces), behavior_(behavior) {}

  void begin() {
    first_ = pieces_.size();
    previous_ = false;
  }
  void add(std::size_t begin, std::size_t end, bool match) {
    const bool joins = pieces_.size() > first_ && joins_previous(match);
    previous_ = match;
    if (match && behavior_ == Behavior::kRemoved) return;
    if (joins) {
      pieces_.back().end = end;
    } else {
      pieces_.push_back({begin, end});
    }
  }
  // Drops empty pieces.
  void end() {
    const auto from = pieces_.begin() + static_cast<std::ptrdiff_t>(first_);
    pieces_.erase(std::remove_if(from, pieces_.end(),
                                 [](const Piece& piece) { return piece.begin == piece.end; }),
                  pieces_.end());
  }

 private:
  bool joins_previous(bool match) const {
    switch (behavior_) {
      case Behavior::kContiguous:
        return match == previous_;
      case Behavior::kMergedWithPrevious:
        return match && !previous_;
      case Behavior::kMergedWithNext:
        return !match && previous_;
      default:
        return false;
    }
  }

  std::vector<Piece>& pieces_;
  Behavior behavior_;
  std::size_t first_ = 0;
  bool previous_ = false;  // was a match
};

// Cuts every piece: visit_matches(text, visit) calls visit(begin, end) for each match in a piece.
template <typename VisitMatches>
void cut(Pieces& pieces, Behavior behavior, bool invert, VisitMatches&& visit_matches) {
  pieces.cut.clear();
  Cutter cutter(pieces.cut, behavior);
  for (const auto& piece : pieces.pieces) {
    cutter.begin();
    std::size_t done = 0;
    const auto text = pieces[piece];
    const auto add = [&](std::size_t begin, std::size_t end, bool match) {
      cutter.add(piece.begin + begin, piece.begin + end, match != invert);
    };
    visit_matches(text, [&](std::size_t begin, std::size_t end) {
      if (begin != done) add(done, begin, false);
      add(begin, end, true);
      done = end;
    });
    if (done != text.size()) add(done, text.size(), false);
    cutter.end();
    if (&piece == &pieces.pieces.front()) {
      pieces.first_starts_input = pieces.first_starts_input && !pieces.cut.empty() &&
                                  pieces.cut.front().begin == piece.begin;
    }
  }
  std::swap(pieces.pieces, pieces.cut);
}

void cut_at_pattern(Pieces& pieces, const Pattern& pattern, Behavior behavior, bool invert) {
  cut(pieces, behavior, invert, [&](std::string_view text, auto&& visit) {
    pattern.for_each_match(text, pieces.stack, visit);
  });
}

void cut_at_set(Pieces& pieces, const CodePointSet& set, Behavior behavior) {
  cut(pieces, behavior, false, [&](std::string_view text, auto&& visit) {
    for (std::size_t at = 0; at < text.size();) {
      const auto begin = at;
      if (set.contains(next_code_point(text, at))) visit(begin, at);
    }
  });
}

// Rewrites every piece: write(piece, index, into) appends the new text.
template <typename Write>
void rewrite(Pieces& pieces, Write&& write) {
  auto& into = pieces.spare;
  into.clear();
  for (std::size_t i = 0; i < pieces.pieces.size(); ++i) {
    const auto begin = into.size();
    write(pieces[pieces.pieces[i]], i, into);
    pieces.pieces[i] = {begin, into.size()};
  }
  std::swap(pieces.rewritten, pieces.spare);
  pieces.text = pieces.rewritten;
}

PreTokenizerStep byte_level(const Component& part) {
  const bool add_prefix_space = part.flag("add_prefix_space", true);
  std::vector<Pattern> pattern;
  if (part.flag("use_regex", true)) pattern.push_back(Pattern({true, std::string(kGpt2)}));
  return [add_prefix_space, pattern](Pieces& pieces) {
    if (add_prefix_space) {
      rewrite(pieces, [](std::string_view piece, std::size_t, std::string& into) {
        if (!piece.starts_with(' ')) into.push_back(' ');
        into.append(piece);
      });
    }
    for (const auto& words : pattern) cut_at_pattern(pieces, words, Behavior::kIsolated, false);
  };
}

PreTokenizerStep metaspace(const Component& part) {
  std::string mark;
  append_utf8(part.character("replacement"), mark);
  auto scheme = part.string("prepend_scheme", "always");
  if (scheme != "always" && scheme != "first" && scheme != "never") {
    part.refuse(fmt::format("the prepend_scheme {}", scheme));
  }
  if (!part.flag("add_prefix_space", true)) {
    require(scheme == "never" || part.string("prepend_scheme", "").empty(), ErrorKind::kCorrupt,
            "{}: add_prefix_space is false, prepend_scheme is {}", part.where(), scheme);
    scheme = "never";
  }
  const bool split = part.flag("split", true);
  return [mark, scheme, split, pattern = Pattern({false, mark})](Pieces& pieces) {
    rewrite(pieces, [&](std::string_view piece, std::size_t index, std::string& into) {
      const bool here =
          scheme == "always" || (scheme == "first" && index == 0 && pieces.first_starts_input);
      if (here && !piece.starts_with(' ') && !piece.starts_with(mark)) into.append(mark);
      for (const char c : piece) {
        if (c == ' ') {
          into.append(mark);
        } else {
          into.push_back(c);
        }
      }
    });
    if (split) cut_at_pattern(pieces, pattern, Behavior::kMergedWithNext, false);
  };
}

void add(const Component& part, std::vector<PreTokenizerStep>& steps, bool& has_byte_level) {
  if (has_byte_level) part.refuse("a pre-tokenizer behind ByteLevel");
  const auto& type = part.type();
  if (type == "Sequence") {
    for (const auto& inner : part.sequence("pretokenizers")) add(inner, steps, has_byte_level);
  } else if (type == "ByteLevel") {
    steps.push_back(byte_level(part));
    has_byte_level = true;
  } else if (type == "Split") {
    steps.emplace_back([pattern = Pattern(part.pattern("pattern")),
                        behavior = behavior_of(part, ""), invert = part.flag("invert", false)](
                           Pieces& pieces) { cut_at_pattern(pieces, pattern, behavior, invert); });
  } else if (type == "Digits") {
    const auto behavior =
        part.flag("individual_digits", false) ? Behavior::kIsolated : Behavior::kContiguous;
    steps.emplace_back([behavior](Pieces& pieces) {
      cut_at_set(pieces, *CodePointSet::named("RustNumeric"), behavior);
    });
  } else if (type == "Punctuation") {
    steps.emplace_back([behavior = behavior_of(part, "Isolated")](Pieces& pieces) {
      cut_at_set(pieces, *CodePointSet::named("Punctuation"), behavior);
    });
  } else if (type == "WhitespaceSplit") {
    steps.emplace_back([](Pieces& pieces) {
      cut_at_set(pieces, *CodePointSet::named("WhiteSpace"), Behavior::kRemoved);
    });
  } else if (type == "Whitespace") {
    const Pattern words({true, R"(\p{RustWord}+|[^\p{RustWord}\s]+)"});
    steps.emplace_back(
        [words](Pieces& pieces) { cut_at_pattern(pieces, words, Behavior::kRemoved, true); });
  } else if (type == "Metaspace") {
    steps.push_back(metaspace(part));
  } else {
    part.refuse_type();
  }
}

}  // namespace

void Pieces::reset(std::string_view new_text, bool starts_input) {
  text = new_text;
  pieces.clear();
  if (!text.empty()) pieces.push_back({0, text.size()});
  first_starts_input = starts_input;
}

PreTokenizer::PreTokenizer(const nlohmann::json& settings, const std::string& where) {
  if (!settings.is_null()) add(Component(settings, where), steps_, byte_level_);
}

void PreTokenizer::split(std::string_view text, bool starts_input, Pieces& into) const {
  into.reset(text, starts_input);
  for (const auto& step : steps_) step(into);
}

}  // namespace ferry::rollout::text
