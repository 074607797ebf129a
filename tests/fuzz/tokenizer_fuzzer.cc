#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "distckpt/base/encodings.h"
#include "rollout/text/tokenizer/tiktoken_file.h"
#include "rollout/text/tokenizer/tokenizer.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

using rollout::text::DecodeStream;
using rollout::text::ModelFiles;
using rollout::text::TokenId;
using rollout::text::Tokenizer;

constexpr std::string_view kTexts[] = {
    "", " ", "It's 12 \xC3\xA9\xE6\xBC\xA2\xF0\x9F\x91\x8D\n\n  <s>aab ab\xCC\x81",
    "a\xFF\xE2\x82"};

// Ids of texts are ids of tokens, and a stream says what the whole says.
void expect_sound(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<TokenId> ids;
  if (!accepts([&] { ids = tokenizer.encode(text, {.add_special_tokens = false}); })) return;
  for (const auto id : ids) expect(tokenizer.id_to_token(id).has_value(), "{} is no token", id);
  const auto whole = tokenizer.decode(ids);
  DecodeStream stream(tokenizer);
  std::string parts;
  for (const auto id : ids) parts += stream.push(id);
  parts += stream.finish();
  expect(parts == whole, "the stream says {}, the whole {}", parts, whole);
}

// The lines of a tiktoken.model that no file lacks: each byte at its own rank.
std::string lines_of_bytes() {
  std::string lines;
  for (unsigned rank = 0; rank < 256; ++rank) {
    const std::array byte{static_cast<std::byte>(rank)};
    lines += fmt::format("{} {}\n", base64_text(byte), rank);
  }
  return lines;
}

}  // namespace

void tokenizer(std::string_view input) {
  accepts([&] {
    const Tokenizer read(input, "fuzz");
    for (const auto text : kTexts) expect_sound(read, text);
  });
}

void tiktoken(std::string_view input) {
  static const auto kBytes = lines_of_bytes();
  const auto config = input.substr(0, input.find('\n'));
  const auto lines = input.substr(std::min(config.size() + 1, input.size()));
  const auto read = [&](const std::string& name) -> std::optional<std::string> {
    if (name == rollout::text::kTiktokenModel) return kBytes + std::string(lines);
    if (name == "tokenizer_config.json") return std::string(config);
    return std::nullopt;
  };
  accepts([&] {
    const auto tokenizer = Tokenizer::from_files(ModelFiles(read, "fuzz"));
    for (const auto text : kTexts) expect_sound(*tokenizer, text);
  });
}

}  // namespace ferry::fuzz
