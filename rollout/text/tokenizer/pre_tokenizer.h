// The pre-tokenizer of a tokenizer.json: cuts a text into pieces, which the model encodes one by
// one.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/regex/regex.h"

namespace ferry::rollout::text {

// A text and its pieces, from left to right, none of them empty.
struct Pieces {
  struct Piece {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  // Makes the text one piece. `starts_input`: it is the beginning of the whole input.
  void reset(std::string_view new_text, bool starts_input);
  std::string_view operator[](const Piece& piece) const {
    return text.substr(piece.begin, piece.end - piece.begin);
  }

  std::string_view text{};
  std::vector<Piece> pieces{};
  bool first_starts_input = false;  // pieces.front() begins at the input's beginning

  // Memory of the steps, reused for each text.
  std::string rewritten{};
  std::string spare{};
  std::vector<Piece> cut{};
  Regex::Stack stack{};
};

class PreTokenizer {
 public:
  PreTokenizer() = default;  // the text is one piece
  // `settings` may be null. Throws Error that names an unsupported type.
  PreTokenizer(const nlohmann::json& settings, const std::string& where);

  // True if the last step is ByteLevel: the model's alphabet is bytes. (The package writes each
  // byte as a character of its own; here bytes stay bytes.)
  bool byte_level() const { return byte_level_; }
  bool empty() const { return steps_.empty(); }

  // `text` is valid UTF-8 and outlives the use of the pieces.
  void split(std::string_view text, bool starts_input, Pieces& into) const;

 private:
  std::vector<std::function<void(Pieces&)>> steps_;
  bool byte_level_ = false;
};

}  // namespace ferry::rollout::text
