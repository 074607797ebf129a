#include "converter/stored/carried_file.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace carried_file_test {

using support::TempDir;

// Longer than two pieces.
std::string long_text() {
  std::string text((std::size_t{2} << 20) + 7, 'a');
  text[std::size_t{1} << 20] = 'b';
  return text;
}

CarriedFile file_of(const TempDir& dir, const std::string& text) {
  distckpt::write_text(dir / "file", text);
  return CarriedFile(distckpt::ReadFile(dir / "file"));
}

TEST(CarriedFile, OfAFileIsWhatOneOfItsTextIs) {
  const TempDir dir;
  const auto file = file_of(dir, long_text());
  const CarriedFile text(long_text());
  EXPECT_EQ(file.size(), text.size());
  EXPECT_EQ(file.text(), text.text());
  EXPECT_EQ(file.digest(), text.digest());
  EXPECT_TRUE(same_bytes(file, text));
}

TEST(CarriedFile, ItsDigestIsThatOfABlock) {
  const std::string text = "dear";
  EXPECT_EQ(CarriedFile(text).digest(), distckpt::digest_block(distckpt::as_bytes(text)));
}

TEST(CarriedFile, DiffersInTheLastByte) {
  auto other = long_text();
  other.back() = 'c';
  EXPECT_FALSE(same_bytes(CarriedFile(long_text()), CarriedFile(other)));
}

TEST(CarriedFile, DiffersInItsLength) {
  EXPECT_FALSE(same_bytes(CarriedFile(std::string("dear")), CarriedFile(std::string("dearest"))));
}

TEST(CarriedFile, IsReadInPiecesOfAMebibyte) {
  std::vector<std::size_t> pieces;
  CarriedFile(long_text()).read([&](auto piece) { pieces.push_back(piece.size()); });
  EXPECT_EQ(pieces, (std::vector<std::size_t>{1 << 20, 1 << 20, 7}));
}

TEST(CarriedFile, IsCopied) {
  const TempDir dir;
  file_of(dir, long_text()).copy_to(dir / "copy");
  EXPECT_EQ(distckpt::read_text(dir / "copy"), long_text());
}

TEST(CarriedFile, AnEmptyOneIsCopied) {
  const TempDir dir;
  CarriedFile(std::string()).copy_to(dir / "copy");
  EXPECT_EQ(distckpt::read_text(dir / "copy"), "");
}

}  // namespace carried_file_test
}  // namespace ferry::converter
