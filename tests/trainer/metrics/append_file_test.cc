#include "trainer/metrics/append_file.h"

#include <gtest/gtest.h>

#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::trainer {
namespace append_file_test {

TEST(AppendFile, MakesItsFoldersAndGrowsByWholeRecords) {
  const support::TempDir dir;
  const AppendFile file(dir / "a/b/log.jsonl");
  file.append("one\n");
  file.append("two\n");
  EXPECT_EQ(distckpt::read_text(file.path()), "one\ntwo\n");
}

TEST(AppendFile, GoesOnBehindWhatIsThere) {
  const support::TempDir dir;
  AppendFile(dir / "log").append("one\n");
  AppendFile(dir / "log").append("two\n");
  EXPECT_EQ(distckpt::read_text(dir / "log"), "one\ntwo\n");
}

TEST(AppendFile, NamesAPlaceThatCannotBeWritten) {
  const support::TempDir dir;
  distckpt::write_text(dir / "file", "");
  EXPECT_TRUE(support::fails(ErrorKind::kIo, {"file"}, [&] { AppendFile(dir / "file/log"); }));
}

}  // namespace append_file_test
}  // namespace ferry::trainer
