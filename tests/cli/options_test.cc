// Options that several subcommands have, and the files that reports go to.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "cli/commands.h"
#include "cli/output_file.h"
#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::cli {
namespace options_test {

namespace fs = std::filesystem;
using support::fails;
using support::TempDir;

TEST(ParseSize, KnowsDecimalAndBinaryUnits) {
  EXPECT_EQ(parse_size("1000", "--x"), 1000);
  EXPECT_EQ(parse_size("5GB", "--x"), 5'000'000'000);
  EXPECT_EQ(parse_size("64MiB", "--x"), std::int64_t{64} << 20);
  EXPECT_EQ(parse_size("1.5KiB", "--x"), 1536);
  EXPECT_EQ(parse_size("20kB", "--x"), 20'000);
  EXPECT_EQ(parse_size("20KB", "--x"), 20'000);
  for (const auto* text : {"5gb", "5G", "5 GB", "5g"})
    EXPECT_EQ(parse_size(text, "--x"), 5'000'000'000) << text;
}

TEST(ParseSize, NamesTheFlagOfTextThatIsNoSize) {
  for (const auto* text : {"", "5  GB", "banana", "-1", "0", "0.5B", "1e30", "5 parrots", "5bg"})
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"--max-memory", "is not a size such as 256MiB or 5GB"},
                      [&] { parse_size(text, "--max-memory"); }))
        << text;
}

TEST(ParseIteration, KnowsNumbersAndRelease) {
  EXPECT_EQ(parse_iteration_flag(""), std::nullopt);
  EXPECT_TRUE(parse_iteration_flag("release").has_value());
  EXPECT_EQ(distckpt::iteration_text(parse_iteration_flag("10").value()), "10");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"--iteration ten", "neither a number nor \"release\""},
                    [] { parse_iteration_flag("ten"); }));
}

constexpr std::string_view kMark = "ours";

TEST(OutputFile, ReplacesOnlyAFileThatFerryWrote) {
  const TempDir dir;
  distckpt::write_text(dir / "own", "this is ours, from before");
  OutputFile(dir / "own", kMark, false).write("new, ours", {});
  EXPECT_EQ(distckpt::read_text(dir / "own"), "new, ours");
  distckpt::write_text(dir / "other", "a letter");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"not a file that ferry wrote", "--overwrite"},
                    [&] { OutputFile(dir / "other", kMark, false); }));
  OutputFile(dir / "other", kMark, true).write("new", {});
  EXPECT_EQ(distckpt::read_text(dir / "other"), "new");
}

TEST(OutputFile, TakesAwayWhatItsSourcesDeny) {
  const TempDir dir;
  distckpt::write_text(dir / "source", "secret");
  distckpt::write_text(dir / "report", "ours");
  fs::permissions(dir / "source", fs::perms(0640));
  fs::permissions(dir.path(), fs::perms(0755));
  OutputFile(dir / "report", kMark, false).write("ours, too", {dir / "source"});
  EXPECT_EQ(fs::status(dir / "report").permissions(), fs::perms(0640));
  OutputFile(dir / "new", kMark, false).write("ours", {dir / "source"});
  EXPECT_EQ(fs::status(dir / "new").permissions(), fs::perms(0640));
}

TEST(OutputFile, RefusesALinkAndAFolder) {
  const TempDir dir;
  distckpt::write_text(dir / "own", "ours");
  fs::create_symlink(dir / "own", dir / "link");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"a symbolic link"},
                    [&] { OutputFile(dir / "link", kMark, false); }));
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"and not a file"}, [&] { OutputFile(dir.path(), kMark, true); }));
}

TEST(OutputFile, NamesAFolderThatIsNotThere) {
  const TempDir dir;
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"nowhere is not a folder"},
                    [&] { OutputFile(dir / "nowhere/report.html", kMark, false); }));
}

TEST(OutputFile, SeesAFileThatCameDuringTheWork) {
  const TempDir dir;
  const OutputFile output(dir / "late", kMark, false);
  distckpt::write_text(dir / "late", "a letter");
  EXPECT_TRUE(
      fails(ErrorKind::kUsage, {"not a file that ferry wrote"}, [&] { output.write("x", {}); }));
  EXPECT_EQ(distckpt::read_text(dir / "late"), "a letter");
}

TEST(TargetFormat, IsThatOfTheBaseUnlessItIsNamed) {
  EXPECT_EQ(target_format("h5", {}), converter::Format::kArchive);
  EXPECT_EQ(target_format("megatron", {}), converter::Format::kTorchDist);
  EXPECT_EQ(target_format("hf", {}), converter::Format::kHuggingFace);
}

}  // namespace options_test
}  // namespace ferry::cli
