#include "rollout/text/object_scanner.h"

#include "rollout/text/shallow_json.h"

namespace ferry::rollout::text {

ObjectScanner::State ObjectScanner::scan(std::string_view text) {
  while (at_ < text.size())
    if (const auto state = take(text[at_++]); state != State::kOpen) return state;
  return State::kOpen;
}

ObjectScanner::State ObjectScanner::take(char c) {
  if (!in_string_) return take_outside(c);
  if (static_cast<unsigned char>(c) < 0x20) return State::kNone;
  if (c == '"' && !escaped_) in_string_ = false;
  escaped_ = c == '\\' && !escaped_;
  return State::kOpen;
}

bool ObjectScanner::is_value_expected() const {
  return last_ == ':' || last_ == '[' || (last_ == ',' && open_.back() == '[');
}

ObjectScanner::State ObjectScanner::take_outside(char c) {
  const auto then = [&](bool is_right, char last) {
    last_ = last;
    return is_right ? State::kOpen : State::kNone;
  };
  const bool continues_word = in_word_;
  in_word_ = false;
  switch (c) {
    case ' ':
    case '\t':
    case '\r':
    case '\n':
      return State::kOpen;
    case '"':
      in_string_ = true;
      return then(last_ == '{' || last_ == ',' || is_value_expected(), 'v');
    case '{':
    case '[': {
      const bool is_right = open_.empty() || is_value_expected();
      open_ += c;
      return then(is_right && open_.size() <= kDeepestJson, c);
    }
    case '}':
    case ']': {
      const char begin = c == '}' ? '{' : '[';
      if (open_.empty() || open_.back() != begin || (last_ != begin && last_ != 'v'))
        return State::kNone;
      open_.pop_back();
      last_ = 'v';
      return open_.empty() ? State::kWhole : State::kOpen;
    }
    case ':':
      return then(last_ == 'v' && open_.back() == '{', c);
    case ',':
      return then(last_ == 'v', c);
    default:
      break;
  }
  const bool is_of_word = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') ||
                          (c >= 'A' && c <= 'Z') || c == '-' || c == '+' || c == '.';
  if (!is_of_word || (!continues_word && (open_.empty() || !is_value_expected())))
    return State::kNone;
  in_word_ = true;
  return then(true, 'v');
}

}  // namespace ferry::rollout::text
