#include "distckpt/storage/source_files.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>

#include "distckpt/base/error.h"
#include "distckpt/execute/file_box_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace source_files_test {

namespace fs = std::filesystem;
using support::fails;
using support::TempDir;

// Files of four bytes: what else but ctime tells them apart after this.
void rewrite_with_its_times(const fs::path& path) {
  struct stat before {};
  ASSERT_EQ(::stat(path.c_str(), &before), 0);
  support::corrupt(path, 1);
  const struct timespec times[] = {before.st_atim, before.st_mtim};
  ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

void replace_by_another(const fs::path& path) {
  write_text(path.string() + ".new", "xxxx");
  fs::rename(path.string() + ".new", path);
}

TEST(SourceFiles, NotesWhatIsOpenedAndNothingElse) {
  const TempDir dir;
  for (const char* name : {"before", "a", "b", "after"}) write_text(dir / name, "text");
  SourceFiles files;
  SourceFiles inner;
  read_text(dir / "before");
  {
    const NotedFiles noted(files);
    read_text(dir / "a");
    {
      const NotedFiles deeper(inner);
      read_text(dir / "b");
    }
    read_text(dir / "a");
  }
  read_text(dir / "after");
  ASSERT_EQ(files.files().size(), 1U);
  EXPECT_EQ(files.files().begin()->first, dir / "a");
  ASSERT_EQ(inner.files().size(), 1U);
  EXPECT_EQ(inner.files().begin()->first, dir / "b");
}

TEST(SourceFiles, RefuseAPointerOfGitLfs) {
  const TempDir dir;
  write_text(dir / "tokenizer.json",
             "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 11421896\n");
  SourceFiles files;
  const NotedFiles noted(files);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"tokenizer.json", "pointer of git-lfs", "git lfs pull"},
                    [&] { read_text(dir / "tokenizer.json"); }));
}

TEST(SourceFiles, TellAFileThatChangedSinceItWasFirstOpened) {
  for (const auto change : {rewrite_with_its_times, replace_by_another}) {
    const TempDir dir;
    write_text(dir / "a", "text");
    SourceFiles files;
    files.add(ReadFile(dir / "a"));
    files.settle();
    EXPECT_NO_THROW(files.require_unchanged());
    EXPECT_NO_THROW(files.require_same(ReadFile(dir / "a")));
    change(dir / "a");
    EXPECT_TRUE(
        fails(ErrorKind::kIo, {"a: was", "while it was read"}, [&] { files.require_unchanged(); }));
    EXPECT_TRUE(
        fails(ErrorKind::kIo, {"a: was"}, [&] { files.require_same(ReadFile(dir / "a")); }));
    EXPECT_TRUE(fails(ErrorKind::kIo, {"a: was"}, [&] { files.add(ReadFile(dir / "a")); }));
  }
}

TEST(SourceFiles, AFileThatIsGoneIsNamed) {
  const TempDir dir;
  write_text(dir / "a", "text");
  SourceFiles files;
  files.add(ReadFile(dir / "a"));
  fs::remove(dir / "a");
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"/a"}, [&] { files.require_unchanged(); }));
}

TEST(FileSource, ReadsNoFileThatIsNotTheOneWhoseHeaderWasRead) {
  const TempDir dir;
  write_text(dir / "a", "text");
  const auto files = std::make_shared<SourceFiles>();
  files->add(ReadFile(dir / "a"));
  files->settle();
  FileSource source({FileStorage{.path = dir / "a", .size = 4}}, {}, ReadMode::kCached, files);
  replace_by_another(dir / "a");
  std::vector<std::byte> bytes(4);
  std::vector<ChecksumPart> parts;
  const Region whole{
      .at = {.storage = 0, .offset = 0, .strides = {1}}, .size = {4}, .element_size = 1};
  EXPECT_TRUE(
      fails(ErrorKind::kIo, {"a: was replaced"}, [&] { source.read(whole, bytes, parts); }));
}

}  // namespace source_files_test
}  // namespace ferry::distckpt
