#include "distckpt/base/printable.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <string>

#include "distckpt/base/error.h"

namespace ferry {
namespace printable_test {

TEST(Printable, LeavesPlainTextOfAnyLanguageAlone) {
  for (const char* text : {"", "model.layers.0.weight", "Gewichte für Übungen", "模型", "a\\b"})
    EXPECT_EQ(printable(text), text);
}

TEST(Printable, EscapesWhatActsOnATerminal) {
  EXPECT_EQ(printable("a\x1b[2Jb\nc\rd\te\x7f"), R"(a\x1b[2Jb\nc\x0dd\x09e\x7f)");
  EXPECT_EQ(printable(std::string("a\0b", 3)), R"(a\x00b)");
  EXPECT_EQ(printable("\xc2\x9b"), R"(\x9b)");              // C1
  EXPECT_EQ(printable("gnp\xe2\x80\xae"), R"(gnp\u202e)");  // turns the line around
  EXPECT_EQ(printable("\xff\xc3(\xe2\x80"), R"(\xff\xc3(\xe2\x80)");
  EXPECT_EQ(printable("\xc0\x8a\xed\xa0\x80"), R"(\xc0\x8a\xed\xa0\x80)");  // overlong, surrogate
}

TEST(Printable, CutsTheMiddleOfWhatIsLong) {
  const auto cut = printable("begin" + std::string(1'000'000, 'x') + "end", 100);
  EXPECT_TRUE(cut.starts_with("beginxxx")) << cut;
  EXPECT_TRUE(cut.ends_with("xxxend")) << cut;
  EXPECT_NE(cut.find("[... 999908 bytes ...]"), std::string::npos) << cut;
  // No letter is cut apart.
  std::string text;
  for (int i = 0; i < 100; ++i) text += "\xe6\xa8\xa1";
  for (const std::size_t limit : {10, 11, 12, 13})
    EXPECT_EQ(printable(text, limit).find("\\x"), std::string::npos);
}

TEST(Printable, IsHowAnErrorIsReported) {
  const auto report = Error(ErrorKind::kCorrupt,
                            "file: \x1b[31m" + std::string(1 << 20, 'n') + ": bad", "see \r it")
                          .add_context("reading \a")
                          .report();
  EXPECT_LT(report.size(), 3000);
  EXPECT_TRUE(report.starts_with("error: file: \\x1b[31mnnn")) << report;
  EXPECT_NE(report.find("n: bad\n  while reading \\x07\nhint: see \\x0d it\n"), std::string::npos)
      << report;
}

TEST(Printable, LinesOfAHintStandUnderItsFirst) {
  EXPECT_EQ(Error(ErrorKind::kDevice, "no room", "less of a\nor of \a\n").report(),
            "error: no room\nhint: less of a\n      or of \\x07\n");
}

TEST(Printable, ErrorsSayWhatComesBehindANul) {
  const Error error(ErrorKind::kCorrupt, std::string("a\0b: bad", 8));
  EXPECT_STREQ(error.what(), R"(a\x00b: bad)");
}

// The words that a shell makes of `words`.
std::string echo(const std::string& words) {
  FILE* pipe = popen(("bash -c 'printf %s \"$0\"' " + words).c_str(), "r");
  std::array<char, 1000> buffer{};
  const auto count = std::fread(buffer.data(), 1, buffer.size(), pipe);
  pclose(pipe);
  return {buffer.data(), count};
}

TEST(ShellQuoted, IsOneWord) {
  EXPECT_EQ(shell_quoted("/data/model-00001-of-00002.bin"), "/data/model-00001-of-00002.bin");
  EXPECT_EQ(shell_quoted("m$(touch PWN)"), "'m$(touch PWN)'");
  for (const char* text :
       {"m$(touch PWN)", "a b", "it's", "`x`", "\"", "a\\b", "*", "~", "#", ";ls"})
    EXPECT_EQ(echo(shell_quoted(text)), text);
  EXPECT_EQ(shell_quoted(""), "''");
  EXPECT_EQ(shell_quoted("a\n'b\\"), R"($'a\x0a\'b\\')");
}

}  // namespace printable_test
}  // namespace ferry
