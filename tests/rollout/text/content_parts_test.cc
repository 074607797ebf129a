// Images in the contents of messages: the places that name them, and the bytes behind each.
#include "rollout/text/content_parts.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "tests/support/expect.h"
#include "tests/support/temp_dir.h"

namespace ferry::rollout::text {
namespace content_parts_test {

using nlohmann::ordered_json;
using support::fails;

ordered_json user(const char* content) {
  auto message = ordered_json::object();
  message["role"] = "user";
  message["content"] = ordered_json::parse(content);
  return ordered_json::array({message});
}

std::vector<std::string> places(const std::vector<ImageSource>& images) {
  std::vector<std::string> all;
  for (const auto& image : images) all.push_back(image.place);
  return all;
}

TEST(TakeImages, LeavesAPlaceOfItsOwnForEach) {
  auto messages = user(R"([{"type": "image", "image": "a.png"},
                          {"type": "text", "text": "and"},
                          {"type": "image_url", "image_url": {"url": "b.png"}}])");
  EXPECT_EQ(places(take_images(messages)), (std::vector<std::string>{"a.png", "b.png"}));
  EXPECT_EQ(messages,
            user(R"([{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}])"));
}

TEST(TakeImages, TakesUnnamedPartsOutOfTheColumn) {
  auto messages = user(R"([{"type": "image"}, {"type": "image", "path": "named.png"}])");
  const auto column = ordered_json::parse(R"([{"path": "first.png"}])");
  EXPECT_EQ(places(take_images(messages, column)),
            (std::vector<std::string>{"first.png", "named.png"}));
}

TEST(TakeImages, SplitsTextAtPlaceholdersIfThereIsAColumn) {
  auto messages = user(R"("<image>left<image>")");
  EXPECT_EQ(places(take_images(messages, ordered_json::parse(R"(["a.png", "b.png"])"))),
            (std::vector<std::string>{"a.png", "b.png"}));
  EXPECT_EQ(messages,
            user(R"([{"type": "image"}, {"type": "text", "text": "left"}, {"type": "image"}])"));
}

TEST(TakeImages, LeavesPlaceholdersInTextWithoutAColumn) {
  auto messages = user(R"("<image> is a tag")");
  EXPECT_TRUE(take_images(messages).empty());
  EXPECT_EQ(messages, user(R"("<image> is a tag")"));
}

TEST(TakeImages, DropsMembersThatAreNull) {
  auto messages = user(R"([{"type": "text", "text": "a", "image": null}])");
  EXPECT_TRUE(take_images(messages).empty());
  EXPECT_EQ(messages, user(R"([{"type": "text", "text": "a"}])"));
}

TEST(TakeImages, CountsTheColumnAndThePlaces) {
  auto messages = user(R"("<image>")");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt,
                    {"images: there are 2, and the messages have places for 1"},
                    [&] { take_images(messages, ordered_json::parse(R"(["a.png", "b.png"])")); }));
}

TEST(TakeImages, NamesAColumnThatIsTooShort) {
  auto messages = user(R"("<image><image>")");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"the column of images has only 1"},
                    [&] { take_images(messages, ordered_json::parse(R"(["a.png"])")); }));
}

TEST(TakeImages, RefusesPartsThatAreNeitherTextNorImage) {
  auto messages = user(R"([{"type": "video", "video": "a.mp4"}])");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"a part of type \"video\" is not read"},
                    [&] { take_images(messages); }));
}

TEST(TakeImages, RefusesASizeThatIsTheProcessors) {
  auto messages = user(R"([{"type": "image", "image": "a.png", "max_pixels": 100}])");
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"an image has max_pixels: its size is the processor's"},
                    [&] { take_images(messages); }));
}

TEST(TakeImages, RefusesAnImageWithoutBytes) {
  auto messages = user(R"([{"type": "image"}])");
  messages[0]["content"][0]["bytes"] = ordered_json::binary({});
  EXPECT_TRUE(
      fails(ErrorKind::kCorrupt, {"an image has no bytes"}, [&] { take_images(messages); }));
}

TEST(HasImages, TellsPartsFromText) {
  EXPECT_FALSE(has_images(user(R"("text")")));
  EXPECT_FALSE(has_images(user(R"([{"type": "text", "text": "a"}, {"text": "b"}])")));
  EXPECT_TRUE(has_images(user(R"([{"text": "b"}, {"type": "image"}])")));
}

TEST(ImageSource, ReadsAFileByItsPathOrItsAddress) {
  const support::TempDir dir;
  distckpt::write_text(dir / "a.png", "pixels");
  EXPECT_EQ(ImageSource{.place = (dir / "a.png").string()}.read(), "pixels");
  EXPECT_EQ(ImageSource{.place = "file://" + (dir / "a.png").string()}.read(), "pixels");
}

// The vectors of RFC 4648, section 10.
TEST(ImageSource, DecodesBase64WithAndWithoutPadding) {
  const auto read = [](const std::string& digits) {
    return ImageSource{.place = "data:image/png;base64," + digits}.read();
  };
  EXPECT_EQ(read(""), "");
  EXPECT_EQ(read("Zg=="), "f");
  EXPECT_EQ(read("Zm8="), "fo");
  EXPECT_EQ(read("Zm9vYmFy"), "foobar");
  EXPECT_EQ(read("Zm9vYg"), "foob");
}

TEST(ImageSource, RefusesDigitsThatAreNotBase64) {
  for (const auto* digits : {"Zm9v!mFy", "Zm9vY", "Zm9v\nZm9v"}) {
    const ImageSource image{.place = std::string("data:image/png;base64,") + digits};
    EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"is not base64"}, [&] { (void)image.read(); }))
        << digits;
  }
}

TEST(ImageSource, RefusesDataThatIsNotInBase64) {
  const ImageSource image{.place = "data:image/svg+xml,%3Csvg"};
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"is not data:image/...;base64,..."},
                    [&] { (void)image.read(); }));
}

TEST(ImageSource, IsReadUpToALimit) {
  const ImageSource bytes{.bytes = "pixels"}, data{.place = "data:image/png;base64,Zm9vYmFy"};
  for (const auto& image : {bytes, data}) {
    EXPECT_EQ(image.read(6).size(), 6U) << image.name();
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"has 6 bytes, more than 5"}, [&] {
      (void)image.read(5);
    })) << image.name();
  }
}

TEST(ImageSource, OfALargerFileIsNotRead) {
  const support::TempDir dir;
  distckpt::write_text(dir / "a.png", "pixels");
  const ImageSource image{.place = (dir / "a.png").string()};
  EXPECT_TRUE(fails(ErrorKind::kCorrupt, {"a.png"}, [&] { (void)image.read(5); }));
}

TEST(ImageSource, OfTheNetworkIsRefused) {
  const ImageSource image{.place = "https://example.com/a.png"};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"https://example.com/a.png: is an address"},
                    [&] { (void)image.read(); }));
}

TEST(ImageSource, IsNamedByTheBeginningOfItsData) {
  const ImageSource image{.place = "data:image/png;base64," + std::string(1000, 'A')};
  EXPECT_EQ(image.name().size(), 83U);
  EXPECT_TRUE(image.name().ends_with("AA..."));
}

}  // namespace content_parts_test
}  // namespace ferry::rollout::text
