// The operations of Python's str that reward rules are written in, on characters.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::trainer::code_points {

using Text = std::u32string;
using View = std::u32string_view;

// Bytes that are no UTF-8 become U+FFFD.
Text decode(std::string_view utf8);
std::string encode(View text);

Text replace(View text, View from, View to);
std::vector<View> split(View text, View separator);
View strip(View text);
View last(View text, std::size_t count);  // text[-count:]
Text lower(View text);
Text join_words(View text);  // " ".join(text.split())
bool is_space(char32_t c);   // str.isspace(), and \s of re
bool is_digit(char32_t c);   // str.isdigit()
bool is_letter(char32_t c);  // str.isalpha()
bool is_word(char32_t c);    // \w of re
bool is_ascii_punctuation(char32_t c);
inline bool is_ascii_digit(char32_t c) {
  return c >= U'0' && c <= U'9';
}

// The text from `begin` to the brace that closes the first one behind it; empty if none does.
View balanced_braces(View text, std::size_t begin);

}  // namespace ferry::trainer::code_points
