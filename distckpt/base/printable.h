// Names that others chose, on a terminal and in a shell: nothing in them moves the cursor, reorders
// the line or runs as a command, and a huge one is cut.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace ferry {

// Control characters, marks that reorder text and bytes that are not UTF-8 are written as escapes
// ("\n", "\x1b", "\u202e"). The middle of a text longer than `max_bytes` is left out, and the
// number of its bytes said.
std::string printable(std::string_view text, std::size_t max_bytes = 240);

// One word for a shell: as it is where that is plain, else in quotes.
std::string shell_quoted(std::string_view text);

}  // namespace ferry
