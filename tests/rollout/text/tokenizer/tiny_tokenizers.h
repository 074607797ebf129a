// Small tokenizers as the JSON of their files, for tests to change.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "rollout/text/tokenizer/bpe.h"
#include "rollout/text/unicode/unicode.h"

namespace ferry::rollout::text {

// All bytes with their own numbers as ids, the merges "ab" (256) and "abc" (257), and "<s>" (258).
inline nlohmann::ordered_json byte_level_tokenizer() {
  using nlohmann::ordered_json;
  auto vocab = ordered_json::object();
  for (unsigned byte = 0; byte < 256; ++byte) {
    std::string name;
    append_utf8(character_of_byte(static_cast<unsigned char>(byte)), name);
    vocab[name] = byte;
  }
  vocab["ab"] = 256;
  vocab["abc"] = 257;
  return {
      {"version", "1.0"},
      {"added_tokens",
       {{{"id", 258}, {"content", "<s>"}, {"special", true}, {"normalized", false}}}},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model",
       {{"type", "BPE"},
        {"vocab", vocab},
        {"merges", ordered_json::parse(R"([["a", "b"], ["ab", "c"]])")}}}};
}

// A model of characters: these tokens with ids from 0 on, and these merges ("a b").
inline nlohmann::ordered_json character_tokenizer(const std::vector<std::string>& tokens,
                                                  const std::vector<std::string>& merges) {
  auto vocab = nlohmann::ordered_json::object();
  for (std::size_t id = 0; id < tokens.size(); ++id) vocab[tokens[id]] = id;
  return {{"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}}};
}

}  // namespace ferry::rollout::text
