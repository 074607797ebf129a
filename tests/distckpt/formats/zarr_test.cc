#include "distckpt/formats/zarr.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string_view>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace zarr_test {

using support::fails;

class ZarrArray : public ::testing::Test {
 protected:
  // An array of bytes, [3, 4] in chunks of [2, 3]: all four chunks hold six.
  ZarrArray() {
    write_description(R"({"zarr_format": 2, "shape": [3, 4], "chunks": [2, 3], "dtype": "|u1",
                 "compressor": null, "filters": null, "order": "C", "fill_value": null})");
    for (const char* name : {"0.0", "0.1", "1.0", "1.1"}) write_text(dir_.path() / name, "abcdef");
  }

  void write_description(std::string_view text) { write_text(dir_.path() / ".zarray", text); }

  Layout read() const {
    Layout layout;
    add_zarr_array(dir_.path(), "key", layout);
    return layout;
  }

  support::TempDir dir_;
};

TEST_F(ZarrArray, ChunksAtTheEndAreStoredWhole) {
  const auto layout = read();
  check_layout(layout);
  const auto& tensor = layout.tensor(0);
  EXPECT_EQ(tensor.shape, (Shape{3, 4}));
  ASSERT_EQ(tensor.shards.size(), 4U);
  const auto& last = tensor.shards[3];
  EXPECT_EQ(last.box, (Box{.offset = {2, 3}, .size = {1, 1}}));
  EXPECT_EQ(last.at.strides, (Dims{3, 1}));
  EXPECT_EQ(last.at.offset, 0);
  EXPECT_TRUE(describe(layout.storages()[last.at.storage]).ends_with("1.1"));
}

TEST_F(ZarrArray, RefusesMissingAndSurplusChunks) {
  std::filesystem::remove(dir_.path() / "1.0");
  EXPECT_TRUE(fails(ErrorKind::kNotFound, {"1.0", "3 of 4"}, [&] { read(); }));
  write_text(dir_.path() / "1.0", "abcdef");
  write_text(dir_.path() / "2.0", "abcdef");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"5 chunks"}, [&] { read(); }));
}

}  // namespace zarr_test
}  // namespace ferry::distckpt
