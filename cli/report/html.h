// The frame of all pages: one style sheet, light and dark; no script, nothing from elsewhere.
#pragma once

#include <string>
#include <string_view>

namespace ferry::cli {

// The first bytes of our pages and pictures say this, and no other's do.
inline constexpr std::string_view kPageMark = R"(<meta name="generator" content="ferry"/>)";
inline constexpr std::string_view kPictureMark = "<metadata>ferry</metadata>";

std::string html_page(std::string_view title, std::string_view body);

// A picture by itself, in the same colours.
std::string svg_file(int width, int height, std::string_view title, std::string_view body);

// A number and what it says.
std::string tile(std::string_view value, std::string_view what);

std::string escape_xml(std::string_view text);

}  // namespace ferry::cli
