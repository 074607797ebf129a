#include "distckpt/storage/file_io.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/random_boxes.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace file_io_test {

namespace fs = std::filesystem;
using support::cut;
using support::fails;
using support::Random;
using support::read_bytes;
using support::same_bytes;
using support::TempDir;
using support::write_bytes;

std::vector<std::byte> read(const ReadFile& file, std::int64_t offset, std::int64_t size) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(size));
  file.read_at(offset, bytes);
  return bytes;
}

TEST(ReadFile, ReadsWhatIsThere) {
  const TempDir dir;
  const auto bytes = Random(1).bytes(10'000);
  write_bytes(dir / "a", bytes);
  const ReadFile file(dir / "a");
  EXPECT_EQ(file.size(), 10'000);
  EXPECT_TRUE(same_bytes(bytes, read(file, 0, 10'000)));
  EXPECT_TRUE(same_bytes(std::span(bytes).subspan(7777, 123), read(file, 7777, 123)));
  EXPECT_TRUE(read(file, 10'000, 0).empty());
}

TEST(ReadFile, NamesTheByteAtWhichAShortFileEnds) {
  const TempDir dir;
  write_bytes(dir / "short", Random(1).bytes(100));
  const ReadFile file(dir / "short");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"short", "ends at byte 100", "90 to 101"},
                    [&] { read(file, 90, 11); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"ends at byte 100"}, [&] { read(file, 101, 0); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"short"}, [&] { read(file, -1, 1); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"short"},
                    [&] { read(file, std::numeric_limits<std::int64_t>::max(), 1); }));
}

class ReadFileModes : public testing::TestWithParam<ReadMode> {};

TEST_P(ReadFileModes, AFileThatIsCutWhileItIsReadIsAnError) {
  const TempDir dir;
  const auto bytes = Random(2).bytes(3 << 20);
  write_bytes(dir / "shrinks", bytes);
  const ReadFile file(dir / "shrinks", GetParam());
  EXPECT_TRUE(same_bytes(std::span(bytes).subspan(1000, 1000), read(file, 1000, 1000)));
  cut(dir / "shrinks", 1'234'567);
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"shrinks", "ends at byte 1234567"},
                    [&] { read(file, 1'000'000, 1'000'000); }));
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"shrinks"}, [&] { read(file, 2'000'000, 10); }));
  EXPECT_TRUE(fails(ErrorKind::kIo, {"shrinks", "changed"}, [&] { file.require_unchanged(); }));
}

TEST_P(ReadFileModes, ReadsAlikeAtOddOffsetsAndLengths) {
  const TempDir dir;
  Random random(3);
  const auto bytes = random.bytes((9 << 20) + 77);  // more than two of the direct reader's pieces
  write_bytes(dir / "odd", bytes);
  const ReadFile file(dir / "odd", GetParam());
  const auto check = [&](std::int64_t offset, std::int64_t size) {
    ASSERT_TRUE(same_bytes(
        std::span(bytes).subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(size)),
        read(file, offset, size)))
        << offset << " + " << size;
  };
  check(0, file.size());
  check(1, file.size() - 1);
  check(file.size() - 1, 1);
  check(file.size(), 0);
  for (const std::int64_t edge : {4096, 1 << 20, 4 << 20, 8 << 20}) {
    for (const std::int64_t from : {edge - 1, edge, edge + 1}) {
      for (const std::int64_t size : {1, 2, 4095, 4096, 4097}) check(from, size);
    }
  }
  for (int i = 0; i < 100; ++i) {
    const auto from = random.between(0, file.size() - 1);
    check(from, random.between(0, std::min<std::int64_t>(file.size() - from, 200'000)));
  }
}

TEST_P(ReadFileModes, ManyThreadsReadOneFile) {
  const TempDir dir;
  const auto bytes = Random(4).bytes(1 << 20);
  write_bytes(dir / "shared", bytes);
  const ReadFile file(dir / "shared", GetParam());
  std::vector<std::jthread> threads;
  std::atomic<int> wrong = 0;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      Random random(t);
      for (int i = 0; i < 50; ++i) {
        const auto from = random.between(0, 1'000'000);
        const auto found = read(file, from, 40'000);
        if (!same_bytes(std::span(bytes).subspan(static_cast<std::size_t>(from), 40'000), found)) {
          ++wrong;
        }
      }
    });
  }
  threads.clear();
  EXPECT_EQ(wrong, 0);
}

TEST_P(ReadFileModes, RefusesWhatIsNoRegularFile) {
  const TempDir dir;
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"absent", "No such file"},
                    [&] { ReadFile(dir / "absent", GetParam()); }));
  EXPECT_TRUE(
      fails(ErrorKind::kIo, {dir.path().c_str()}, [&] { ReadFile(dir.path(), GetParam()); }));
  EXPECT_TRUE(fails(ErrorKind::kIo, {"/dev/null", "not a regular file"},
                    [&] { ReadFile("/dev/null", GetParam()); }));
  write_bytes(dir / "file", {});
  EXPECT_TRUE(
      fails(ErrorKind::kIo, {"file/below"}, [&] { ReadFile(dir / "file/below", GetParam()); }));
}

TEST_P(ReadFileModes, DoesNotWaitForAPipe) {
  const TempDir dir;
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  EXPECT_TRUE(fails(ErrorKind::kIo, {"pipe", "not a regular file"},
                    [&] { ReadFile(dir / "pipe", GetParam()); }));
}

INSTANTIATE_TEST_SUITE_P(,
                         ReadFileModes,
                         testing::Values(ReadMode::kCached, ReadMode::kDirect),
                         [](const auto& mode) {
                           return mode.param == ReadMode::kCached ? "cached" : "direct";
                         });

TEST(ReadFile, SeesThatAFileWasChanged) {
  const TempDir dir;
  write_bytes(dir / "a", Random(5).bytes(100));
  const ReadFile file(dir / "a");
  EXPECT_NO_THROW(file.require_unchanged());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // coarser clocks tick every 10
  support::corrupt(dir / "a", 50);
  EXPECT_TRUE(fails(ErrorKind::kIo, {"changed"}, [&] { file.require_unchanged(); }));
}

TEST(WriteFile, BytesThatWereNeverWrittenAreZero) {
  const TempDir dir;
  const auto bytes = Random(6).bytes(100);
  {
    const WriteFile file(dir / "holes", 10'000);
    file.write_at(5000, bytes);
    file.sync();
  }
  auto expected = std::vector<std::byte>(10'000);
  std::ranges::copy(bytes, expected.begin() + 5000);
  EXPECT_TRUE(same_bytes(expected, read_bytes(dir / "holes")));
}

TEST(WriteFile, CreateDropsWhatWasThereAndReopenKeepsIt) {
  const TempDir dir;
  const auto bytes = Random(7).bytes(100);
  write_bytes(dir / "a", bytes);
  { const WriteFile file(dir / "a", 200, WriteFile::Mode::kReopen); }
  auto expected = bytes;
  expected.resize(200);
  EXPECT_TRUE(same_bytes(expected, read_bytes(dir / "a")));
  { const WriteFile file(dir / "a", 200); }
  EXPECT_TRUE(same_bytes(std::vector<std::byte>(200), read_bytes(dir / "a")));
}

TEST(WriteFile, SaysWhichFolderIsMissing) {
  const TempDir dir;
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"absent/a"}, [&] { WriteFile(dir / "absent/a", 1); }));
  EXPECT_TRUE(fails(ErrorKind::kIo, {dir.path().c_str()}, [&] { WriteFile(dir.path(), 1); }));
}

// The exit status of a child that runs `body`: 0 if it returned true.
template <typename Body>
int in_child(Body&& body) {
  const auto child = ::fork();
  if (child == 0) {
    try {
      ::_exit(body() ? 0 : 1);
    } catch (...) {
      ::_exit(2);
    }
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

TEST(WriteFile, BeyondTheLimitOfTheProcessIsAnError) {
  const TempDir dir;
  EXPECT_EQ(in_child([&] {
              std::signal(SIGXFSZ, SIG_IGN);
              const rlimit limit{.rlim_cur = 4096, .rlim_max = 4096};
              if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return false;
              return static_cast<bool>(fails(ErrorKind::kIo, {"large", "File too large"},
                                             [&] { WriteFile(dir / "large", 10'000); }));
            }),
            0);
}

TEST(WriteFile, OnAFullFileSystemIsAnErrorThatNamesTheByte) {
  const TempDir dir;
  const auto status = in_child([&] {
    // Private, so that nobody else sees the mount; it goes with this child.
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount("none", dir.path().c_str(), "tmpfs", 0, "size=64k") != 0) {
      return ::_exit(77), false;
    }
    const WriteFile file(dir / "full", 1 << 20);
    const auto bytes = Random(8).bytes(256 << 10);
    return static_cast<bool>(fails(ErrorKind::kIo,
                                   {"full", "writing at byte 4096", "No space left on device"},
                                   [&] { file.write_at(4096, bytes); }));
  });
  if (status == 77) GTEST_SKIP() << "only root may mount a file system of its own";
  EXPECT_EQ(status, 0);
}

TEST(Text, ThereAndBackIsTheSame) {
  const TempDir dir;
  const std::string text("a\0b\n", 4);
  write_text(dir / "text", text);
  EXPECT_EQ(read_text(dir / "text"), text);
  write_text(dir / "text", "");
  EXPECT_EQ(read_text(dir / "text"), "");
}

TEST(Text, RefusesMoreThanIsExpected) {
  const TempDir dir;
  write_text(dir / "text", "12345");
  EXPECT_EQ(read_text(dir / "text", 5), "12345");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"text", "5 bytes"}, [&] { read_text(dir / "text", 4); }));
}

TEST(SyncDirectory, TakesFoldersOnly) {
  const TempDir dir;
  EXPECT_NO_THROW(sync_directory(dir.path()));
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"absent"}, [&] { sync_directory(dir / "absent"); }));
  write_text(dir / "text", "");
  EXPECT_TRUE(fails(ErrorKind::kIo, {"text"}, [&] { sync_directory(dir / "text"); }));
}

TEST(Descriptor, ClosesOnceAndCanBeMoved) {
  const TempDir dir;
  write_text(dir / "a", "x");
  const int fd = ::open((dir / "a").c_str(), O_RDONLY | O_CLOEXEC);
  {
    Descriptor first(fd);
    Descriptor second(std::move(first));
    EXPECT_EQ(second.get(), fd);
    Descriptor third;
    third = std::move(second);
    EXPECT_TRUE(static_cast<bool>(third));
    EXPECT_EQ(::fcntl(fd, F_GETFD) >= 0, true);
  }
  EXPECT_EQ(::fcntl(fd, F_GETFD), -1);
}

TEST(ReplaceText, ExchangesTheWholeFile) {
  const TempDir dir;
  replace_text(dir / "tracker", "10");
  EXPECT_EQ(read_text(dir / "tracker"), "10");
  replace_text(dir / "tracker", "release");
  EXPECT_EQ(read_text(dir / "tracker"), "release");
  EXPECT_EQ(support::list(dir.path()), std::vector<std::string>{"tracker"});
  EXPECT_TRUE(
      fails(ErrorKind::kNotFound, {"absent"}, [&] { replace_text(dir / "absent/tracker", "10"); }));
}

TEST(ReplaceText, FollowsNoLink) {
  const TempDir dir;
  write_text(dir / "letter", "mine");
  fs::create_symlink("letter", dir / "tracker");
  fs::create_symlink("letter", dir / "tracker.ferry-tmp");
  replace_text(dir / "tracker", "10");
  EXPECT_EQ(read_text(dir / "letter"), "mine");
  EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(dir / "tracker")));
  EXPECT_TRUE(fails(ErrorKind::kIo, {"tmp"}, [&] { write_text(dir / "tracker.ferry-tmp", "10"); }));
  EXPECT_EQ(read_text(dir / "letter"), "mine");
}

TEST(ReplaceText, KeepsThePermissionsOfWhatWasThere) {
  const TempDir dir;
  replace_text(dir / "new", "10", 0600);
  EXPECT_EQ(identity_of(dir / "new").mode, 0600U);
  fs::permissions(dir / "new", fs::perms(0640));
  replace_text(dir / "new", "20", 0600);
  EXPECT_EQ(identity_of(dir / "new").mode, 0640U);
}

TEST(ReadFile, KnowsWhatLiesInsideAFolder) {
  const TempDir dir;
  const auto snapshot = dir / "models--a--b/snapshots/0123";
  fs::create_directories(snapshot / "deep");
  fs::create_directories(dir / "models--a--b/blobs");
  fs::create_directories(dir / "blobs");
  for (const char* name : {"models--a--b/blobs/x", "models--a--b/x", "blobs/x"})
    write_text(dir / name, name);
  write_text(snapshot / "deep/file", "inside");
  const auto link = [&](const char* to) {
    fs::remove(snapshot / "link");
    fs::create_symlink(to, snapshot / "link");
    return ReadFile(snapshot / "link");
  };
  EXPECT_NO_THROW(ReadFile(snapshot / "deep/file").require_inside(snapshot));
  EXPECT_NO_THROW(link("deep/file").require_inside(snapshot));
  EXPECT_NO_THROW(link("../../blobs/x").require_inside(snapshot));
  for (const char* to : {"../../x", "../../../blobs/x", "/etc/passwd"}) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"link", "outside", "--follow-symlinks"}, [&] {
      link(to).require_inside(snapshot);
    })) << to;
  }
}

}  // namespace file_io_test
}  // namespace ferry::distckpt
