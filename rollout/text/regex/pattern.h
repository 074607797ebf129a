// The pattern of a Replace or a Split: a literal string or a regular expression, and its matches in
// a text from left to right.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "rollout/text/regex/regex.h"

namespace ferry::rollout::text {

class Pattern {
 public:
  // (whether it is a regular expression, its text), which Component::pattern() returns.
  explicit Pattern(std::pair<bool, std::string> pattern) {
    if (pattern.first) {
      regex_ = std::make_shared<Regex>(pattern.second);
    } else {
      literal_ = std::move(pattern.second);
    }
  }

  // Calls visit(begin, end) for each match, from left to right.
  template <typename Visit>
  void for_each_match(std::string_view text, Regex::Stack& stack, Visit&& visit) const {
    if (!regex_) {
      for (auto at = text.find(literal_); at != text.npos;
           at = text.find(literal_, at + literal_.size())) {
        visit(at, at + literal_.size());
      }
      return;
    }
    // An empty match at the end of the previous match does not count.
    std::size_t from = 0, last_end = text.npos;
    while (from <= text.size()) {
      const auto match = regex_->find(text, from, stack);
      if (!match) return;
      if (match->begin == match->end && match->end == last_end) {
        from += from < text.size() ? utf8_length(text[from]) : 1;
        continue;
      }
      from = last_end = match->end;
      visit(match->begin, match->end);
    }
  }

  std::string replace(std::string_view text, std::string_view content) const {
    std::string replaced;
    Regex::Stack stack;
    std::size_t copied = 0;
    for_each_match(text, stack, [&](std::size_t begin, std::size_t end) {
      replaced.append(text.substr(copied, begin - copied)).append(content);
      copied = end;
    });
    return replaced.append(text.substr(copied));
  }

 private:
  std::string literal_;
  std::shared_ptr<const Regex> regex_;
};

}  // namespace ferry::rollout::text
