#include "converter/write/publication.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <string>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace publication_test {

namespace fs = std::filesystem;
using support::fails;

class PublicationTest : public testing::Test {
 protected:
  // Publishes a folder of one file.
  void publish(const distckpt::PublishedModes& modes = {}) const {
    Publication publication(dir_ / "out");
    publication.expect({"a.txt"});
    distckpt::write_text(publication.output() / "a.txt", "new");
    publication.publish(modes);
    publication.replace_beside("latest.txt", "out", 0640);
  }
  unsigned mode_of(const char* name) const {
    struct stat found {};
    EXPECT_EQ(::stat((dir_ / name).c_str(), &found), 0);
    return found.st_mode & 0777;
  }

  support::TempDir dir_;
};

TEST_F(PublicationTest, ShowsNothingBeforeItIsPublished) {
  Publication publication(dir_ / "out");
  publication.expect({"a.txt"});
  distckpt::write_text(publication.output() / "a.txt", "new");
  EXPECT_FALSE(fs::exists(dir_ / "out"));
}

TEST_F(PublicationTest, LeavesNothingBehindIfItIsNotPublished) {
  {
    Publication publication(dir_ / "deep/er/out");
    publication.expect({"a.txt"});
    distckpt::write_text(publication.output() / "a.txt", "new");
  }
  EXPECT_TRUE(fs::is_empty(dir_.path()));
}

TEST_F(PublicationTest, ShowsTheFolderAndTheFileBesideIt) {
  publish();
  EXPECT_EQ(support::list(dir_.path()),
            (std::vector<std::string>{"latest.txt", "out", "out/a.txt"}));
  EXPECT_EQ(distckpt::read_text(dir_ / "out/a.txt"), "new");
  EXPECT_EQ(distckpt::read_text(dir_ / "latest.txt"), "out");
}

TEST_F(PublicationTest, GivesTheModesThatAreAsked) {
  publish({.file = 0600, .folder = 0700});
  EXPECT_EQ(mode_of("out"), 0700U);
  EXPECT_EQ(mode_of("out/a.txt"), 0600U);
  EXPECT_EQ(mode_of("latest.txt"), 0640U);
}

TEST_F(PublicationTest, RefusesATargetThatHasFilesBeforeTheyAreWritten) {
  fs::create_directory(dir_ / "out");
  distckpt::write_text(dir_ / "out/old.txt", "dear");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"out: exists already", "choose another target"},
                    [&] { const Publication late(dir_ / "out"); }));
  EXPECT_EQ(support::list(dir_.path()), (std::vector<std::string>{"out", "out/old.txt"}));
}

TEST_F(PublicationTest, RefusesATargetThatAnotherOneHolds) {
  const Publication first(dir_ / "out");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"out"}, [&] { const Publication second(dir_ / "out"); }));
}

}  // namespace publication_test
}  // namespace ferry::converter
