#include "converter/write/linked_target.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/temp_dir.h"

namespace ferry::converter {
namespace linked_target_test {

namespace fs = std::filesystem;
using Texts = std::map<std::string, std::string>;

class LinkedTargetTest : public testing::Test {
 protected:
  // A file "a.safetensors" of a tensor of four bytes, two rows of one F16 each.
  std::unique_ptr<FileTarget> target(Texts texts) const {
    auto header = distckpt::make_safetensors_header(
        "a.safetensors", {{.name = "t", .dtype = distckpt::DType::kF16, .shape = {2, 1}}}, {});
    distckpt::TensorMap links;
    links.links.push_back(distckpt::BoxLink::whole(5, 0, {2, 1}));
    return make_linked_target(std::move(header), std::move(links), std::move(texts), dir_.path());
  }

  support::TempDir dir_;
};

TEST_F(LinkedTargetTest, NamesItsFiles) {
  auto files = target({{"b.json", "{}"}, {"c.json", "{}"}})->files(dir_.path());
  std::ranges::sort(files);
  EXPECT_EQ(files, (std::vector<fs::path>{"a.safetensors", "b.json", "c.json"}));
}

TEST_F(LinkedTargetTest, ItsTensorsAreTheBoxesOfTheLinks) {
  const auto made = target({});
  ASSERT_EQ(made->side().map->links.size(), 1U);
  EXPECT_EQ(made->side().map->links[0].model, 5U);
  EXPECT_EQ(made->layout().tensors().at(0).name, "t");
}

TEST_F(LinkedTargetTest, WritesTheFileAndWhatStandsBesideIt) {
  const auto made = target({{"b.json", "{\"r\": 8}"}});
  auto& sink = made->open_files([](distckpt::StorageId) { return true; });
  const auto& at = made->layout().tensors().at(0).shards.at(0).at;
  const std::vector bytes{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}};
  std::vector<distckpt::ChecksumPart> parts;
  sink.write({.at = at, .size = {2, 1}, .element_size = 2}, bytes, parts);
  EXPECT_FALSE(fs::exists(dir_ / "b.json"));  // it makes the folder an adapter
  made->close_sink();
  EXPECT_EQ(distckpt::read_text(dir_ / "b.json"), "{\"r\": 8}");
  const auto header = distckpt::read_safetensors_header(dir_ / "a.safetensors");
  ASSERT_EQ(header.entries.size(), 1U);
  EXPECT_EQ(header.entries[0].shape, (distckpt::Shape{2, 1}));
  const auto written = support::read_bytes(dir_ / "a.safetensors");
  EXPECT_TRUE(support::same_bytes(
      bytes, std::span(written).subspan(static_cast<std::size_t>(header.entries[0].begin))));
}

TEST_F(LinkedTargetTest, RefusesAFolderThatIsNotThere) {
  fs::remove(dir_.path());
  EXPECT_TRUE(support::fails(ErrorKind::kNotFound, {"a.safetensors", "cannot be created"}, [&] {
    target({})->open_files([](distckpt::StorageId) { return true; });
  }));
  fs::create_directory(dir_.path());
}

}  // namespace linked_target_test
}  // namespace ferry::converter
