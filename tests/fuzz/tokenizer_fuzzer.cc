#include <string>
#include <vector>

#include "rollout/text/tokenizer/tokenizer.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

using rollout::text::DecodeStream;
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

}  // namespace

void tokenizer(std::string_view input) {
  accepts([&] {
    const Tokenizer read(input, "fuzz");
    for (const auto text : kTexts) expect_sound(read, text);
  });
}

}  // namespace ferry::fuzz
