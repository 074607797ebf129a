// Finds the end of a JSON object or list in a text that comes in parts, without reading a byte
// twice.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace ferry::rollout::text {

class ObjectScanner {
 public:
  enum class State : std::uint8_t {
    kOpen,   // more text may end it
    kWhole,  // it ends at end()
    kNone    // no text that begins so is one
  };

  // `text` begins with the object or list, and with what earlier calls had. kWhole may be one that
  // does not parse all the same; one that parses is kWhole.
  State scan(std::string_view text);
  std::size_t end() const { return at_; }

 private:
  State take(char c);
  State take_outside(char c);
  bool is_value_expected() const;

  std::size_t at_ = 0;
  std::string open_{};  // the brackets around, outermost first
  char last_ = 0;       // what came last: a bracket, a comma, a colon, or 'v' for a value
  bool in_string_ = false;
  bool in_word_ = false;  // a number or a name, which goes on
  bool escaped_ = false;
};

}  // namespace ferry::rollout::text
