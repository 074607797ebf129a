// Files that leave the machine while they are written, to a store of the test.
#include "distckpt/execute/upload_sink.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/network/md5.h"
#include "tests/support/expect.h"
#include "tests/support/files.h"
#include "tests/support/random_boxes.h"
#include "tests/support/remote/environment.h"
#include "tests/support/remote/stub_server.h"
#include "tests/support/temp_dir.h"

namespace ferry::distckpt {
namespace upload_sink_test {

using support::anonymous_s3;
using support::Environment;
using support::fails;
using support::read_bytes;
using support::same_bytes;
using support::stub_answer;
using support::StubRequest;
using support::StubServer;

constexpr std::int64_t kPart = std::int64_t{8} << 20;
using Bytes = std::vector<std::byte>;

std::string text_of(const Bytes& bytes, std::int64_t begin, std::int64_t end) {
  return {reinterpret_cast<const char*>(bytes.data()) + begin,
          static_cast<std::size_t>(end - begin)};
}

// S3 of one bucket: parts by number, of whichever upload.
class Store {
 public:
  std::string answer(const StubRequest& asked) {
    const std::lock_guard lock(mutex_);
    const auto query = asked.target.substr(std::min(asked.target.find('?'), asked.target.size()));
    const auto has = [&](const char* name) { return query.find(name) != std::string::npos; };
    const auto etag = md5_of(asked.body);
    if (asked.method == "GET") return stub_answer(200, has("uploads=") ? unfinished() : parts());
    if (asked.method == "DELETE") {
      aborted.push_back(query.substr(query.find('=') + 1));
      return stub_answer(204);
    }
    if (asked.method == "POST" && has("uploads="))
      return stub_answer(200, "<R><UploadId>new</UploadId></R>");
    if (asked.method == "POST") {
      completed = query.substr(query.find('=') + 1);
      for (const auto& [number, body] : sent) object += body;
      return stub_answer(200);
    }
    if (!has("partNumber=")) {
      object = asked.body;
      return stub_answer(200, "", {"ETag: " + etag});
    }
    const auto number = std::stoi(query.substr(query.find("partNumber=") + 11));
    if (number == refused) return stub_answer(403);
    sent[number] = asked.body;
    ++num_sent;
    return stub_answer(200, "", {"ETag: " + etag});
  }

  // {key: uploads} and the parts of them that an interrupted run has left.
  std::map<std::string, std::vector<std::string>> left{};
  std::map<int, std::string> sent{};
  int refused = 0;
  // Observed, while no request is under way:
  std::string object{}, completed{};
  std::vector<std::string> aborted{};
  int num_sent = 0;

 private:
  static std::string md5_of(const std::string& text) {
    return "\"" + hex_text(md5(std::as_bytes(std::span(text)))) + "\"";
  }
  std::string unfinished() const {
    std::string xml = "<L>";
    for (const auto& [key, ids] : left)
      for (const auto& id : ids)
        xml.append("<Upload><Key>" + key + "</Key><UploadId>" + id + "</UploadId></Upload>");
    return xml + "</L>";
  }
  std::string parts() const {
    std::string xml = "<L>";
    for (const auto& [number, body] : sent)
      xml += "<Part><PartNumber>" + std::to_string(number) + "</PartNumber><ETag>" + md5_of(body) +
             "</ETag><Size>" + std::to_string(body.size()) + "</Size></Part>";
    return xml + "</L>";
  }

  std::mutex mutex_;
};

class UploadSinkTest : public testing::Test {
 protected:
  // A file of `size` bytes, of which those of `protect` have a checksum.
  void open(std::int64_t size,
            bool resume = false,
            const std::vector<ChecksumRange>& protect = {}) {
    bytes_ = support::Random(1).bytes(size);
    files_ = std::make_unique<FileSink>(
        std::vector<Storage>{FileStorage{.path = dir_ / "a", .size = size}}, protect,
        WriteFile::Mode::kCreate);
    sink_ = std::make_unique<UploadSink>(
        *files_, std::vector{UploadedFile{.local = dir_ / "a", .size = size, .place = place_}},
        resume, [this](std::uint32_t range) {
          finished_.push_back(range);
          if (at_finish_) at_finish_();
        });
  }
  void write(std::int64_t begin, std::int64_t end) {
    const Region region{.at = {.storage = 0, .offset = begin, .strides = {1}},
                        .size = {end - begin},
                        .element_size = 1};
    std::vector<ChecksumPart> parts;
    sink_->write(region, part(begin, end), parts);
    sink_->commit(parts);
  }
  std::span<const std::byte> part(std::int64_t begin, std::int64_t end) const {
    return std::span(bytes_).subspan(static_cast<std::size_t>(begin),
                                     static_cast<std::size_t>(end - begin));
  }
  std::string text(std::int64_t begin, std::int64_t end) const {
    return text_of(bytes_, begin, end);
  }

  Store store_;
  support::TempDir dir_;
  S3Place place_{.bucket = "runs", .key = "run/a"};
  StubServer server_{[this](const StubRequest& asked) { return store_.answer(asked); }};
  Environment environment_ = anonymous_s3(server_.url());
  Bytes bytes_;
  std::unique_ptr<FileSink> files_;
  std::unique_ptr<UploadSink> sink_;
  std::vector<std::uint32_t> finished_;
  std::function<void()> at_finish_;
};

TEST_F(UploadSinkTest, SendsAPartOnceAllOfItIsWrittenInWhateverOrder) {
  open(kPart + 5);
  write(kPart - 100, kPart + 2);
  write(0, 1000);
  EXPECT_EQ(store_.num_sent, 0);
  write(1000, kPart - 100);
  EXPECT_EQ(store_.num_sent, 1);
  EXPECT_TRUE(store_.sent.at(1) == text(0, kPart));
  write(kPart + 2, kPart + 5);
  EXPECT_EQ(store_.sent.at(2), text(kPart, kPart + 5));
  EXPECT_TRUE(store_.object.empty());
  sink_->complete();
  EXPECT_EQ(store_.completed, "new");
  EXPECT_TRUE(store_.object == text(0, kPart + 5));
  EXPECT_EQ(store_.num_sent, 2);
}

TEST_F(UploadSinkTest, LeavesAHoleInPlaceOfWhatWasSent) {
  open(kPart + 5);
  write(0, kPart + 2);
  const auto local = read_bytes(dir_ / "a");
  EXPECT_TRUE(std::ranges::all_of(std::span(local).first(kPart),
                                  [](std::byte byte) { return byte == std::byte{}; }));
  EXPECT_TRUE(same_bytes(part(kPart, kPart + 2), std::span(local).subspan(kPart, 2)));
}

TEST_F(UploadSinkTest, SendsInTheEndWhatNobodyWrote) {
  open(kPart + 5);
  write(0, 10);
  sink_->complete();
  EXPECT_EQ(store_.num_sent, 2);
  EXPECT_EQ(store_.object.size(), static_cast<std::size_t>(kPart) + 5);
  EXPECT_EQ(store_.object.substr(0, 12), text(0, 10) + std::string(2, '\0'));
}

TEST_F(UploadSinkTest, TellsOnceOfARangeThatIsWholeAndSendsWhatIsWrittenThen) {
  at_finish_ = [this] { files_->write_raw(0, 100, part(100, 104)); };
  open(104, false, {{.storage = 0, .offset = 0, .size = 100}});
  write(50, 100);
  EXPECT_TRUE(finished_.empty());
  write(0, 50);
  EXPECT_EQ(finished_, (std::vector<std::uint32_t>{0}));
  EXPECT_EQ(store_.sent.at(1), text(0, 104));
}

TEST_F(UploadSinkTest, LeavesNothingInTheStoreWhereItDoesNotComplete) {
  open(10);
  write(0, 10);
  sink_.reset();
  EXPECT_EQ(store_.aborted, (std::vector<std::string>{"new"}));
  EXPECT_TRUE(store_.object.empty());
}

TEST_F(UploadSinkTest, LeavesItsPartsToTheNextRunWithResume) {
  open(10, /*resume=*/true);
  write(0, 10);
  sink_.reset();
  EXPECT_TRUE(store_.aborted.empty());
}

TEST_F(UploadSinkTest, ThatIsCompleteIsNotAborted) {
  open(10);
  sink_->complete();
  sink_.reset();
  EXPECT_TRUE(store_.aborted.empty());
}

TEST_F(UploadSinkTest, GoesOnWithTheNewestUploadOfAnEarlierRun) {
  store_.left = {{"run/a", {"older", "old"}}, {"run/b", {"of another"}}};
  bytes_ = support::Random(1).bytes(kPart + 5);
  store_.sent[1] = text(0, kPart);
  open(kPart + 5, /*resume=*/true);
  EXPECT_TRUE(store_.aborted.empty());  // another run may be at it
  write(0, kPart + 5);
  sink_->complete();
  EXPECT_EQ(store_.aborted, (std::vector<std::string>{"older"}));
  EXPECT_EQ(store_.num_sent, 1);  // the end alone
  EXPECT_EQ(sink_->kept_bytes(), kPart);
  EXPECT_EQ(store_.completed, "old");
  EXPECT_TRUE(store_.object == text(0, kPart + 5));
}

TEST_F(UploadSinkTest, RemovesUploadsOfEarlierRunsWithoutResume) {
  store_.left = {{"run/a", {"older", "old"}}, {"run/b", {"of another"}}};
  open(10);
  EXPECT_TRUE(store_.aborted.empty());  // another run may be at it
  write(0, 10);
  sink_->complete();
  EXPECT_EQ(store_.aborted, (std::vector<std::string>{"older", "old"}));
  EXPECT_EQ(sink_->kept_bytes(), 0);
}

TEST_F(UploadSinkTest, TellsOfAPartThatTheStoreRefuses) {
  store_.refused = 1;
  open(10);
  EXPECT_TRUE(fails(ErrorKind::kIo, {"s3://runs/run/a"}, [&] { write(0, 10); }));
}

class SendFile : public UploadSinkTest {
 protected:
  void send(std::int64_t size) {
    bytes_ = support::Random(1).bytes(size);
    support::write_bytes(dir_ / "a", bytes_);
    send_file({.local = dir_ / "a", .size = size, .place = place_});
  }
};

TEST_F(SendFile, ThatIsSmallIsOneRequest) {
  send(100);
  EXPECT_EQ(server_.requests().size(), 1U);
  EXPECT_EQ(store_.object, text(0, 100));
}

TEST_F(SendFile, ThatIsLargeComesInParts) {
  store_.left = {{"run/a", {"old"}}};
  send(2 * kPart + 1);
  EXPECT_EQ(store_.num_sent, 3);
  EXPECT_EQ(store_.aborted, (std::vector<std::string>{"old"}));
  EXPECT_TRUE(store_.object == text(0, 2 * kPart + 1));
}

TEST_F(SendFile, LeavesNothingBehindWhereAPartFails) {
  store_.refused = 2;
  EXPECT_TRUE(fails(ErrorKind::kIo, {"s3://runs/run/a"}, [&] { send(kPart + 1); }));
  EXPECT_EQ(store_.aborted, (std::vector<std::string>{"new"}));
  EXPECT_TRUE(store_.object.empty());
}

}  // namespace upload_sink_test
}  // namespace ferry::distckpt
