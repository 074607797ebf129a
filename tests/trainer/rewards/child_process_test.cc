// Programs that are spoken to by lines.
#include "trainer/rewards/child_process.h"

#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

#include "tests/support/expect.h"

namespace ferry::trainer {
namespace child_process_test {

using std::chrono::milliseconds;
using support::fails;

// The next line, for at most ten seconds; "" at the end.
std::string line_of(ChildProcess& process, std::string_view unsent = {}) {
  for (int i = 0; i < 100 && !process.ended(); ++i)
    if (const auto line = process.exchange(unsent, milliseconds(100))) return *line;
  return process.exchange(unsent, milliseconds(0)).value_or("");
}

std::string end_of(ChildProcess& process) {
  while (!process.ended()) line_of(process);
  return *process.ended();
}

TEST(ChildProcess, AnswersLineByLine) {
  ChildProcess process("while read x; do echo \"<$x>\"; done");
  EXPECT_EQ(line_of(process, "one\n"), "<one>");
  EXPECT_EQ(line_of(process, "two\n"), "<two>");
  process.close_input();
  EXPECT_EQ(end_of(process), "exit status 0");
}

TEST(ChildProcess, TellsHowItEnded) {
  ChildProcess failed("exit 3");
  EXPECT_EQ(end_of(failed), "exit status 3");
  ChildProcess killed("kill -9 $$");
  EXPECT_EQ(end_of(killed), "signal 9");
}

TEST(ChildProcess, TellsThatItClosedItsOutputAndWorksOn) {
  ChildProcess process("exec >&-; sleep 60");
  EXPECT_EQ(end_of(process), "closed its output");
}

TEST(ChildProcess, GivesLinesThatItSaidBeforeItsEnd) {
  ChildProcess process("echo a; echo; echo b");
  (void)end_of(process);
  ChildProcess again("printf 'a\\nb\\n'");
  EXPECT_EQ(line_of(again), "a");
  EXPECT_EQ(line_of(again), "b");
}

TEST(ChildProcess, GivesNoLineThatHasNoEnd) {
  ChildProcess process("printf half");
  EXPECT_EQ(line_of(process), "");
  EXPECT_EQ(end_of(process), "exit status 0");
}

TEST(ChildProcess, SendsMoreThanAPipeHolds) {
  const std::string text(std::size_t{1} << 20, 'x');
  ChildProcess process("wc -c");
  std::string_view unsent = text;
  while (!unsent.empty() && !process.ended()) process.exchange(unsent, milliseconds(100));
  process.close_input();
  EXPECT_EQ(line_of(process), std::to_string(text.size()));
}

TEST(ChildProcess, OutlivesAProgramThatDoesNotRead) {
  ChildProcess process("exec <&-; sleep 0.2");
  const std::string text(std::size_t{1} << 20, 'x');
  std::string_view unsent = text;
  while (!unsent.empty() && !process.ended()) process.exchange(unsent, milliseconds(100));
  EXPECT_EQ(end_of(process), "exit status 0");
}

TEST(ChildProcess, TakesItsWordsAsTheyAre) {
  ChildProcess process(std::vector<std::string>{"printf", "%s\\n", "a b; exit 3"});
  EXPECT_EQ(line_of(process), "a b; exit 3");
}

TEST(ChildProcess, NamesAProgramThatIsNotThere) {
  EXPECT_TRUE(fails(ErrorKind::kIo, {"/nowhere/program: cannot be started"},
                    [] { ChildProcess process(std::vector<std::string>{"/nowhere/program"}); }));
}

TEST(ChildProcess, EndsWithItsObject) {
  const auto begin = std::chrono::steady_clock::now();
  { ChildProcess process("trap '' HUP TERM; sleep 600"); }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

}  // namespace child_process_test
}  // namespace ferry::trainer
