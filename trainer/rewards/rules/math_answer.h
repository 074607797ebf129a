// The answer that the text of a solution gives, where math_verify 0.9.0 finds it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace ferry::trainer::math_verify {

// The content of the braces at `open`; nothing if they do not close.
std::optional<std::string_view> in_braces(std::string_view text, std::size_t open);

// The content of the last \boxed{} or \fbox{}, with those before it that belong to the same list
// ("\boxed{1} and \boxed{2}" is "1,2").
std::optional<std::string> boxed(std::string_view text);

// The first of these that the text has:
// - the formula or number behind "final answer is", if no box follows; boxed();
// - what stands behind the last "answer:", or else behind the last "answer": the rest of the line
//   if it is a formula without words, or the first formula or number within 50 characters, or the
//   line if it has three words at most;
// - the last formula or number of the text.
// A formula stands in $$...$$, \[...\], $...$, \(...\) or brackets among spaces, or is a \frac of
// numbers; up to six, with "and", "or" or a comma between them, are one list.
std::optional<std::string> answer_of(std::string_view text);

}  // namespace ferry::trainer::math_verify
