#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <regex>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/remote_tree.h"
#include "tests/support/expect.h"
#include "tests/support/remote/environment.h"
#include "tests/support/remote/stub_server.h"

namespace ferry::distckpt {
namespace remote_object_test {

using support::Environment;
using support::fails;
using support::stub_answer;
using support::StubRequest;
using support::StubServer;

// The range that is asked for, as an answer of a server that has `bytes`.
std::string range_of(const StubRequest& asked,
                     const std::string& bytes,
                     const std::string& etag = "\"1\"") {
  std::smatch range;
  const auto text = asked.header("range");
  if (!std::regex_match(text, range, std::regex("bytes=(\\d+)-(\\d+)")))
    return stub_answer(200, bytes, {"ETag: " + etag});
  const auto first = std::stoul(range[1]);
  const auto last = std::min(std::stoul(range[2]), bytes.size() - 1);
  if (first >= bytes.size()) return stub_answer(416);
  return stub_answer(
      206, bytes.substr(first, last - first + 1),
      {"ETag: " + etag, fmt::format("Content-Range: bytes {}-{}/{}", first, last, bytes.size())});
}

std::string numbered(std::size_t size) {
  std::string bytes;
  for (int i = 0; bytes.size() < size; ++i) bytes += fmt::format("{} ", i);
  bytes.resize(size);
  return bytes;
}

class RemoteObjectTest : public testing::Test, public RemoteStore {
 public:
  RemoteList list(const std::string&) override { return {}; }
  HttpRequest request(const std::string& address) override {
    return {.url = server_.url() + "/" + address, .bearer = "token"};
  }

 protected:
  std::shared_ptr<const RemoteObject> open() { return RemoteObject::open("file", *this); }
  static std::string read(const RemoteObject& object, std::int64_t offset, std::size_t length) {
    std::string bytes(length, '-');
    object.read_at(offset, std::as_writable_bytes(std::span(bytes)));
    return bytes;
  }
  std::size_t num_requests() const { return server_.requests().size(); }

  const std::string bytes_ = numbered(1 << 20);
  StubServer::Answer answer_ = [this](const StubRequest& asked) { return range_of(asked, bytes_); };
  StubServer server_{[this](const StubRequest& asked) { return answer_(asked); }};
  Environment quick_{{"FERRY_HTTP_RETRIES", "1"}};
};

TEST_F(RemoteObjectTest, KnowsItsSizeAndItsVersion) {
  const auto object = open();
  EXPECT_EQ(object->size(), 1 << 20);
  EXPECT_EQ(object->version(), "\"1\"");
  EXPECT_EQ(server_.requests().at(0).header("authorization"), "Bearer token");
}

TEST_F(RemoteObjectTest, ReadsNeighboursFromOneBlock) {
  const auto object = open();
  EXPECT_EQ(read(*object, 300'000, 50), bytes_.substr(300'000, 50));
  EXPECT_EQ(num_requests(), 2U);
  EXPECT_EQ(read(*object, 300'050, 5000), bytes_.substr(300'050, 5000));
  EXPECT_EQ(read(*object, 10, 20), bytes_.substr(10, 20));  // of what open() was answered
  EXPECT_EQ(num_requests(), 2U);
}

TEST_F(RemoteObjectTest, ReadsOverTheEdgeOfTwoBlocks) {
  const auto object = open();
  const auto edge = std::int64_t{3} << 17;
  EXPECT_EQ(read(*object, edge - 10, 20), bytes_.substr(static_cast<std::size_t>(edge) - 10, 20));
}

TEST_F(RemoteObjectTest, ReadsALongRangeAtOnce) {
  const auto object = open();
  EXPECT_EQ(read(*object, 1, 700'000), bytes_.substr(1, 700'000));
  EXPECT_EQ(server_.requests().at(1).header("range"), "bytes=1-700000");
  EXPECT_EQ(num_requests(), 2U);
}

TEST_F(RemoteObjectTest, ReadsItsLastByte) {
  EXPECT_EQ(read(*open(), (1 << 20) - 1, 1), bytes_.substr((1 << 20) - 1));
}

TEST_F(RemoteObjectTest, IsNothingWhereThereIsNone) {
  answer_ = [](const StubRequest&) { return stub_answer(404); };
  EXPECT_EQ(open(), nullptr);
}

TEST_F(RemoteObjectTest, MayBeEmpty) {
  answer_ = [](const StubRequest&) { return stub_answer(416, "no such range"); };
  EXPECT_EQ(open()->size(), 0);
}

TEST_F(RemoteObjectTest, ThatIsShortMayComeWithoutRanges) {
  answer_ = [](const StubRequest&) { return stub_answer(200, "short", {"ETag: x"}); };
  const auto object = open();
  EXPECT_EQ(object->size(), 5);
  EXPECT_EQ(read(*object, 1, 3), "hor");
}

TEST_F(RemoteObjectTest, ThatIsLongDoesNotComeWithoutRanges) {
  answer_ = [this](const StubRequest&) { return stub_answer(200, bytes_, {"ETag: x"}); };
  EXPECT_TRUE(fails(ErrorKind::kIo, {"file", "no ranges of bytes", "1048576"}, [&] { open(); }));
}

TEST_F(RemoteObjectTest, WithoutAVersionIsAnError) {
  answer_ = [](const StubRequest&) { return stub_answer(200, "short"); };
  EXPECT_TRUE(fails(ErrorKind::kIo, {"neither ETag nor Last-Modified"}, [&] { open(); }));
}

TEST_F(RemoteObjectTest, ThatNeedsCredentialsSaysSo) {
  answer_ = [](const StubRequest&) { return stub_answer(403); };
  EXPECT_TRUE(fails(ErrorKind::kIo, {"answered 403", "needs credentials"}, [&] { open(); }));
}

TEST_F(RemoteObjectTest, RefusesARangeThatItDidNotAskFor) {
  for (const auto* range : {"bytes 1-131072/1048576", "bytes 0-131071/*", "bytes 0-131071/100",
                            "bytes 0-9/1048576", "pages 0-131071/1048576"}) {
    answer_ = [&](const StubRequest&) {
      return stub_answer(206, bytes_.substr(0, 1 << 17),
                         {"ETag: x", std::string("Content-Range: ") + range});
    };
    EXPECT_TRUE(fails(ErrorKind::kIo, {"asked for bytes 0", range}, [&] { open(); })) << range;
  }
}

TEST_F(RemoteObjectTest, ThatWasReplacedIsAnError) {
  const auto object = open();
  answer_ = [this](const StubRequest& asked) { return range_of(asked, bytes_, "\"2\""); };
  EXPECT_TRUE(fails(ErrorKind::kIo, {"changed by someone else", "it was \"1\", and is \"2\""},
                    [&] { read(*object, 300'000, 10); }));
}

TEST_F(RemoteObjectTest, ThatBecameShorterIsAnError) {
  const auto object = open();
  answer_ = [this](const StubRequest& asked) { return range_of(asked, bytes_.substr(0, 200'000)); };
  EXPECT_TRUE(fails(ErrorKind::kIo, {"changed by someone else", "416"},
                    [&] { read(*object, 300'000, 10); }));
}

TEST_F(RemoteObjectTest, GoesOnWhereAConnectionBroke) {
  const auto object = open();
  std::atomic<int> cuts = 0;
  answer_ = [&](const StubRequest& asked) {
    auto whole = range_of(asked, bytes_);
    if (++cuts > 3) return whole;  // more than the tries without a byte in between
    return whole.substr(0, whole.find("\r\n\r\n") + 4 + 100'000);
  };
  EXPECT_EQ(read(*object, 200'000, 600'000), bytes_.substr(200'000, 600'000));
  EXPECT_EQ(server_.requests().at(4).header("range"), "bytes=500000-799999");
}

TEST_F(RemoteObjectTest, IsGivenUpIfNoByteComes) {
  const auto object = open();
  answer_ = [](const StubRequest&) { return stub_answer(503, "later"); };
  EXPECT_TRUE(fails(ErrorKind::kIo, {"file", "answered 503: later, 2 times"},
                    [&] { read(*object, 300'000, 10); }));
}

TEST_F(RemoteObjectTest, AsksTheAddressThatItWasRedirectedTo) {
  answer_ = [this](const StubRequest& asked) {
    if (asked.target == "/file") return stub_answer(302, "", {"Location: /signed"});
    return range_of(asked, bytes_);
  };
  const auto object = open();
  read(*object, 300'000, 10);
  EXPECT_EQ(num_requests(), 3U);  // the redirect was followed once
  EXPECT_EQ(server_.requests().back().target, "/signed");
}

TEST_F(RemoteObjectTest, AsksAnewWhereASignedAddressHasExpired) {
  std::atomic<int> signature = 1;
  answer_ = [&](const StubRequest& asked) {
    const auto now = fmt::format("/signed/{}", signature.load());
    if (asked.target == "/file") return stub_answer(302, "", {"Location: " + now});
    return asked.target == now ? range_of(asked, bytes_) : stub_answer(403, "expired");
  };
  const auto object = open();
  signature = 2;
  EXPECT_EQ(read(*object, 300'000, 10), bytes_.substr(300'000, 10));
}

TEST_F(RemoteObjectTest, TakesItsTokenToNoOtherServer) {
  const StubServer other([this](const StubRequest& asked) { return range_of(asked, bytes_); });
  answer_ = [&](const StubRequest&) {
    return stub_answer(302, "", {"Location: " + other.url() + "/signed"});
  };
  const auto object = open();
  read(*object, 300'000, 10);
  ASSERT_EQ(other.requests().size(), 2U);
  for (const auto& asked : other.requests()) EXPECT_EQ(asked.header("authorization"), "");
}

}  // namespace remote_object_test
}  // namespace ferry::distckpt
