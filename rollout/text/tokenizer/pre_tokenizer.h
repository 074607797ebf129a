// The pre-tokenizer of a tokenizer.json: cuts a text into the pieces that the model sees one by
// one.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "rollout/text/regex/regex.h"

namespace ferry::rollout::text {

// A text and the pieces of it, from left to right, none of them empty.
struct Pieces {
  struct Piece {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  // Without pieces. `starts_input`: it begins where the whole input begins.
  void reset(std::string_view new_text, bool starts_input);
  std::string_view operator[](const Piece& piece) const {
    return text.substr(piece.begin, piece.end - piece.begin);
  }

  std::string_view text{};
  std::vector<Piece> pieces{};
  bool first_starts_input = false;  // pieces.front() begins where the input begins

  // What the steps write to, kept from text to text.
  std::string rewritten{};
  std::string spare{};
  std::vector<Piece> cut{};
  Regex::Stack stack{};
};

class PreTokenizer {
 public:
  PreTokenizer() = default;  // the text is one piece
  // `settings` may be null. Throws Error that names a type that is not supported.
  PreTokenizer(const nlohmann::json& settings, const std::string& where);

  // The model's alphabet are bytes: the last step is ByteLevel. (The package writes each byte as a
  // character of its own; here the bytes stay as they are.)
  bool byte_level() const { return byte_level_; }
  bool empty() const { return steps_.empty(); }

  // `text` is valid UTF-8 and lives as long as the pieces are used.
  void split(std::string_view text, bool starts_input, Pieces& into) const;

 private:
  std::vector<std::function<void(Pieces&)>> steps_;
  bool byte_level_ = false;
};

}  // namespace ferry::rollout::text
