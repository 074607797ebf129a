#include "distckpt/base/error.h"

#include <algorithm>

#include "distckpt/base/printable.h"

namespace ferry {
namespace {

constexpr std::size_t kMaxLine = 2000;  // of what is printed: names can be of any length

// what() ends at a NUL, and a name in the middle of a message may hold one.
std::string without_nul(std::string text) {
  for (auto at = text.find('\0'); at != std::string::npos; at = text.find('\0', at))
    text.replace(at, 1, "\\x00");
  return text;
}

}  // namespace

std::string_view to_string(ErrorKind kind) {
  static constexpr std::string_view kNames[] = {"usage", "not_found", "corrupt",   "layout",
                                                "io",    "device",    "cancelled", "bug"};
  static_assert(std::size(kNames) == static_cast<std::size_t>(ErrorKind::kBug) + 1);
  return kNames[static_cast<std::size_t>(kind)];
}

Error::Error(ErrorKind kind, const std::string& message, std::string hint)
    : std::runtime_error(without_nul(message)), kind_(kind), hint_(std::move(hint)) {}

Error& Error::add_context(std::string frame) {
  context_.push_back(std::move(frame));
  return *this;
}

Error& Error::set_hint(std::string hint) {
  hint_ = std::move(hint);
  return *this;
}

void fail_with(ErrorKind kind, fmt::string_view message, fmt::format_args args) {
  throw Error(kind, fmt::vformat(message, args));
}

std::string Error::report() const {
  auto text = fmt::format("error: {}\n", printable(what(), kMaxLine));
  for (const auto& frame : context_)
    text += fmt::format("  while {}\n", printable(frame, kMaxLine));
  std::string_view margin = "hint: ";
  for (std::string_view rest = hint_; !rest.empty(); margin = "      ") {
    const auto line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    text += fmt::format("{}{}\n", margin, printable(line, kMaxLine));
  }
  return text;
}

}  // namespace ferry
