// Conversations as tokens: those of the assistant's are learned, and nothing else.
#include "trainer/dataset/sft_examples.h"

#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/expect.h"
#include "tests/trainer/dataset/byte_folder.h"

namespace ferry::trainer {
namespace sft_examples_test {

using support::ByteFolder;
using support::fails;

SftExample encode(const char* messages,
                  const DataConfig& data = {},
                  std::string_view chat_template = support::kLetters) {
  const ByteFolder folder(chat_template);
  return SftEncoder(folder.path(), data, {}).encode({.messages = Messages::parse(messages)});
}

// The text of an example: letters that are learned are capitals, an end of text is "$" if it is
// learned, else "|".
std::string shown(const SftExample& example) {
  std::string text;
  for (std::size_t i = 0; i < example.tokens.size(); ++i) {
    const bool learned = example.learned[i];
    if (example.tokens[i] == support::kEndOfText) {
      text += learned ? '$' : '|';
      continue;
    }
    const auto letter = static_cast<char>(example.tokens[i]);
    text += learned ? static_cast<char>(letter - 'a' + 'A') : letter;
  }
  return text;
}

TEST(SftEncoder, LearnsWhatTheAssistantSaysInEachTurn) {
  EXPECT_EQ(shown(encode(R"([{"role": "system", "content": "be"},
                             {"role": "user", "content": "hi"},
                             {"role": "assistant", "content": "yo"},
                             {"role": "user", "content": "no"},
                             {"role": "assistant", "content": "ok"}])")),
            "sbe|uhi|aYO$uno|aOK$");
}

TEST(SftEncoder, LearnsNothingBehindTheLastAnswer) {
  EXPECT_EQ(shown(encode(R"([{"role": "user", "content": "hi"},
                             {"role": "assistant", "content": "yo"},
                             {"role": "user", "content": "no"}])")),
            "uhi|aYO$uno|");
}

constexpr auto* kTurn = R"([{"role": "user", "content": "hi"},
                            {"role": "assistant", "content": "yo"}])";

TEST(SftEncoder, EndsAPlainResponseWithTheEndOfText) {
  EXPECT_EQ(shown(encode(kTurn, {}, "")), "hiYO$");
}

TEST(SftEncoder, AsksForAPromptAndAResponseWithoutATemplate) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"without a chat template"},
                    [] { encode(R"([{"role": "assistant", "content": "yo"}])", {}, ""); }));
}

TEST(SftEncoder, RefusesATemplateThatChangesWhatWasSaid) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"says message 1 otherwise when others follow it"}, [] {
    encode(R"([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"},
               {"role": "user", "content": "no"}])",
           {},
           "{% for message in messages %}{% if loop.last %}!{% endif %}{{ message.content }};"
           "{% endfor %}");
  }));
}

TEST(SftEncoder, RefusesASequenceThatIsTooLong) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"8 tokens, more than data.max_length of 7"},
                    [] { encode(kTurn, {.max_length = 7, .truncation = Truncation::kError}); }));
}

TEST(SftEncoder, CutsTheSideThatItIsToldTo) {
  EXPECT_EQ(shown(encode(kTurn, {.max_length = 6, .truncation = Truncation::kLeft})), "i|aYO$");
  EXPECT_EQ(shown(encode(kTurn, {.max_length = 6, .truncation = Truncation::kRight})), "uhi|aY");
}

TEST(SftEncoder, KeepsASequenceWhoseAnswerIsCutOff) {
  EXPECT_EQ(shown(encode(kTurn, {.max_length = 4, .truncation = Truncation::kRight})), "uhi|");
}

TEST(SftEncoder, RefusesASequenceWithoutATokenToLearn) {
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"no token of the assistant's to learn"}, [] {
    encode(kTurn, {}, "{% for message in messages %}{% if loop.first %}hi{% endif %}{% endfor %}");
  }));
}

TEST(SftEncoder, TellsTheTemplateWhatTheRunAndTheRowSay) {
  const ByteFolder folder(
      "{{ name }}{% if enable_thinking is defined %}{{ 't' if enable_thinking else 'f' }}"
      "{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}");
  DataConfig data;
  data.apply_chat_template_kwargs = {{"name", {std::string("n")}}};
  const auto text = [&](std::optional<bool> of_row) {
    return shown(SftEncoder(folder.path(), data, {})
                     .encode({.messages = Messages::parse(kTurn), .enable_thinking = of_row}));
  };
  EXPECT_EQ(text({}), "nhiYO");
  EXPECT_EQ(text(true), "nthiYO");
  data.apply_chat_template_kwargs["enable_thinking"] = {true};
  EXPECT_EQ(text({}), "nthiYO");
  EXPECT_EQ(text(false), "nfhiYO");
}

TEST(SftEncoder, RefusesImagesOfAModelThatDoesNotSee) {
  const ByteFolder folder;
  const SftEncoder encoder(folder.path(), {}, {});
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"the model's images are not computed", "data.image_key"}, [&] {
        encoder.encode({.messages = Messages::parse(kTurn), .images = {{.place = "a.png"}}});
      }));
}

TEST(SftTensors, SayTheNextTokenAndWhetherItIsLearned) {
  const auto tensors = tensors_of({.tokens = {5, 6, 7}, .learned = {false, true, false}});
  EXPECT_TRUE(tensors.tokens.equal(at::tensor({5, 6, 7}, at::kLong)));
  EXPECT_TRUE(tensors.labels.equal(at::tensor({6, 7, 0}, at::kLong)));
  EXPECT_TRUE(tensors.weights.equal(at::tensor({1.0F, 0.0F, 0.0F})));
}

}  // namespace sft_examples_test
}  // namespace ferry::trainer
