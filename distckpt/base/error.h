// One exception type for the whole program: what went wrong, of which kind, while doing what, and
// what to do about it.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ferry {

enum class ErrorKind {
  kUsage,      // the caller asked for something impossible
  kNotFound,   // a file, tensor or iteration that does not exist
  kCorrupt,    // bytes that contradict themselves or their format
  kLayout,     // shapes, dtypes or layouts that do not fit together
  kIo,         // the operating system refused
  kDevice,     // an accelerator refused
  kCancelled,  // stopped on request
  kBug,        // an invariant of this program is broken
};

std::string_view to_string(ErrorKind kind);

// what() is the message alone; report() adds the context gathered while unwinding and the hint.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, std::string hint = "");

  ErrorKind kind() const noexcept { return kind_; }
  const std::string& hint() const noexcept { return hint_; }
  const std::vector<std::string>& context() const noexcept { return context_; }

  // Called while unwinding; printed as "  while <frame>", innermost first.
  Error& add_context(std::string frame);
  Error& set_hint(std::string hint);

  // "error: <message>\n  while <frame>...\nhint: <hint>\n"
  std::string report() const;

 private:
  ErrorKind kind_;
  std::string hint_;
  std::vector<std::string> context_;
};

// Throws Error. One function for all messages: what a message is made of is not compiled at each
// place that throws.
[[noreturn]] void fail_with(ErrorKind kind, fmt::string_view message, fmt::format_args args);

template <typename... Args>
[[noreturn]] void fail(ErrorKind kind, fmt::format_string<Args...> message, Args&&... args) {
  fail_with(kind, message, fmt::make_format_args(args...));
}

// Throws Error unless `ok`. The message is formatted only on failure.
template <typename... Args>
void require(bool ok, ErrorKind kind, fmt::format_string<Args...> message, Args&&... args) {
  if (!ok) [[unlikely]] {
    fail_with(kind, message, fmt::make_format_args(args...));
  }
}

// Runs `body`; an Error that leaves it gains the frame `describe()` returns.
template <typename Describe, typename Body>
decltype(auto) with_context(Describe&& describe, Body&& body) {
  try {
    return body();
  } catch (Error& error) {
    error.add_context(describe());
    throw;
  }
}

}  // namespace ferry
