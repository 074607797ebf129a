#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/encodings.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/network/md5.h"
#include "distckpt/storage/network/s3_client.h"
#include "distckpt/storage/network/s3_upload.h"
#include "tests/support/expect.h"
#include "tests/support/remote/environment.h"
#include "tests/support/remote/stub_server.h"

namespace ferry::distckpt {
namespace s3_test {

using support::anonymous_s3;
using support::Environment;
using support::fails;
using support::stub_answer;
using support::StubRequest;
using support::StubServer;

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

TEST(S3Address, IsABucketAndAKey) {
  const auto place = parse_s3_address("s3://runs.of-mine/a/b c");
  EXPECT_EQ(place.bucket, "runs.of-mine");
  EXPECT_EQ(place.key, "a/b c");
  EXPECT_EQ(place.address(), "s3://runs.of-mine/a/b c");
  EXPECT_EQ(parse_s3_address("s3://bucket").address(), "s3://bucket");
}

TEST(S3Address, WithoutABucketIsAnError) {
  for (const auto* address : {"s3://", "s3:///key", "s3://a b/key", "s3://user@host/key"}) {
    EXPECT_TRUE(fails(ErrorKind::kUsage, {"names no bucket", "s3://BUCKET/KEY"}, [&] {
      parse_s3_address(address);
    })) << address;
  }
}

TEST(S3Request, GoesToTheBucketsHost) {
  const auto nobody = anonymous_s3("");
  EXPECT_EQ(s3_request("GET", {.bucket = "runs", .key = "a/b c"}).url,
            "https://runs.s3.us-east-1.amazonaws.com/a/b%20c");
  const Environment region{{"AWS_DEFAULT_REGION", "eu-west-1"}};
  EXPECT_EQ(s3_request("GET", {.bucket = "my.runs", .key = "a"}).url,
            "https://s3.eu-west-1.amazonaws.com/my.runs/a");
}

TEST(S3Request, GoesToAnotherEndpointWithTheBucketInItsPath) {
  const auto nobody = anonymous_s3("http://127.0.0.1:9//");
  const auto request =
      s3_request("GET", {.bucket = "runs"}, {{"prefix", "a/b&c"}, {"list-type", "2"}});
  EXPECT_EQ(request.url, "http://127.0.0.1:9/runs/?list-type=2&prefix=a%2Fb%26c");
  EXPECT_FALSE(request.aws);
}

TEST(S3Request, RefusesAnEndpointThatIsNoAddress) {
  const auto wrong = anonymous_s3("localhost:9000");
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"AWS_ENDPOINT_URL_S3", "https:// or http://"},
                    [] { s3_request("GET", {.bucket = "runs"}); }));
}

TEST(S3Request, RefusesOneKeyOfTwo) {
  const auto nobody = anonymous_s3("http://127.0.0.1:9");
  const Environment half{{"AWS_ACCESS_KEY_ID", "me"}};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"only one of the two is set"},
                    [] { s3_request("GET", {.bucket = "runs"}); }));
}

TEST(S3Request, BearsASignature) {
  const StubServer server([](const StubRequest&) { return stub_answer(200); });
  const auto nobody = anonymous_s3(server.url());
  const Environment keys{{"AWS_ACCESS_KEY_ID", "me"},
                         {"AWS_SECRET_ACCESS_KEY", "secret"},
                         {"AWS_SESSION_TOKEN", "session"},
                         {"AWS_REGION", "eu-west-1"}};
  s3_send(s3_request("GET", {.bucket = "runs", .key = "a"}), {.bucket = "runs", .key = "a"});
  const auto asked = server.requests().at(0);
  EXPECT_TRUE(asked.header("authorization").starts_with("AWS4-HMAC-SHA256 Credential=me/"));
  EXPECT_NE(asked.header("authorization").find("/eu-west-1/s3/aws4_request"), std::string::npos);
  EXPECT_EQ(asked.header("x-amz-security-token"), "session");
  EXPECT_EQ(asked.header("x-amz-content-sha256"), "UNSIGNED-PAYLOAD");
  for (const auto& [name, value] : asked.headers)
    EXPECT_EQ(value.find("secret"), std::string::npos) << name;
}

// The error that an answer to one request becomes.
Error error_of(const std::string& answer) {
  const StubServer server([&](const StubRequest&) { return answer; });
  const auto nobody = anonymous_s3(server.url());
  const S3Place place{.bucket = "runs", .key = "a"};
  try {
    s3_send(s3_request("GET", place), place);
  } catch (const Error& error) {
    return error;
  }
  return {ErrorKind::kBug, "it took the answer"};
}

TEST(S3Send, NamesWhatIsNotThere) {
  EXPECT_TRUE(support::is_error(error_of(stub_answer(404, "<Error><Code>NoSuchKey</Code></Error>")),
                                ErrorKind::kNotFound, {"s3://runs/a", "404: NoSuchKey"}));
}

TEST(S3Send, NamesTheRegionOfABucketThatIsElsewhere) {
  EXPECT_TRUE(support::is_error(error_of(stub_answer(301, "", {"x-amz-bucket-region: eu-west-3"})),
                                ErrorKind::kIo, {"region eu-west-3", "set AWS_REGION"}));
}

TEST(S3Send, NamesTheKeysThatARefusedRequestLacks) {
  EXPECT_TRUE(support::is_error(error_of(stub_answer(403)), ErrorKind::kIo,
                                {"answered 403", "set AWS_ACCESS_KEY_ID"}));
}

TEST(S3Xml, GivesTheTextsOfElementsInOrder) {
  std::vector<std::string> found;
  for_each_element("<A><Key>1</Key><Keys>no</Keys><Key>2</Key><Key>cut", "Key",
                   [&](std::string_view text) { found.emplace_back(text); });
  EXPECT_EQ(found, (std::vector<std::string>{"1", "2"}));
}

TEST(S3Xml, DecodesEntities) {
  EXPECT_EQ(element_text("<K>a&amp;b&lt;&gt;&quot;&apos;&#39;&#x41;</K>", "K"), "a&b<>\"''A");
  EXPECT_EQ(element_text("<K>&#xfc;&#8364;&#x1F600;</K>", "K"), "ü€😀");
  EXPECT_EQ(element_text("<K>a & b</K>", "K"), "a & b");
  EXPECT_EQ(element_text("<A></A>", "K"), std::nullopt);
}

// Lists.

std::string page_of(const std::string& objects, const std::string& more = "") {
  return stub_answer(200, "<ListBucketResult>" + objects + more + "</ListBucketResult>");
}

std::map<std::string, std::int64_t> list_of(const StubServer::Answer& answer) {
  const StubServer server(answer);
  const auto nobody = anonymous_s3(server.url());
  std::map<std::string, std::int64_t> found;
  s3_list({.bucket = "runs"}, "a/",
          [&](std::string key, std::int64_t size) { found.emplace(std::move(key), size); });
  return found;
}

TEST(S3List, GoesOnPageByPage) {
  const auto found = list_of([](const StubRequest& asked) {
    const bool first = asked.target.find("continuation-token") == std::string::npos;
    if (!first) {
      EXPECT_NE(asked.target.find("continuation-token=on%2Bon"), std::string::npos);
    }
    return first ? page_of("<Contents><Key>a/1</Key><Size>10</Size></Contents>",
                           "<IsTruncated>true</IsTruncated>"
                           "<NextContinuationToken>on+on</NextContinuationToken>")
                 : page_of("<Contents><Key>a/&amp;</Key><Size>20</Size></Contents>");
  });
  EXPECT_EQ(found, (std::map<std::string, std::int64_t>{{"a/&", 20}, {"a/1", 10}}));
}

TEST(S3List, LeavesObjectsOutThatWereNotAskedFor) {
  EXPECT_TRUE(list_of([](const StubRequest&) {
                return page_of("<Contents><Key>b/1</Key><Size>10</Size></Contents>");
              }).empty());
}

TEST(S3List, WithoutSizesIsAnError) {
  EXPECT_TRUE(fails(ErrorKind::kIo, {"s3://runs", "without key or size"}, [] {
    list_of([](const StubRequest&) { return page_of("<Contents><Key>a/1</Key></Contents>"); });
  }));
}

TEST(S3List, ThatDoesNotSayHowToGoOnIsAnError) {
  EXPECT_TRUE(fails(ErrorKind::kIo, {"not how to go on"}, [] {
    list_of([](const StubRequest&) { return page_of("", "<IsTruncated>true</IsTruncated>"); });
  }));
}

TEST(S3List, OfSomethingElseIsAnError) {
  EXPECT_TRUE(fails(ErrorKind::kIo, {"no list of objects"}, [] {
    list_of([](const StubRequest&) { return stub_answer(200, "<html>welcome</html>"); });
  }));
}

// Uploads, to a store that answers as `other` says, or as S3 does.

class S3UploadTest : public testing::Test {
 protected:
  std::string answer(const StubRequest& asked) {
    if (other) {
      if (auto text = other(asked); !text.empty()) return text;
    }
    if (asked.method == "POST" && asked.target.ends_with("?uploads="))
      return stub_answer(200, "<R><UploadId>id 1</UploadId></R>");
    return stub_answer(200, "", {"ETag: \"" + hex_text(md5(bytes_of(asked.body))) + "\""});
  }

  std::function<std::string(const StubRequest&)> other{};
  S3Place place_{.bucket = "runs", .key = "a"};
  StubServer server_{[this](const StubRequest& asked) { return answer(asked); }};
  Environment environment_ = anonymous_s3(server_.url());
};

TEST_F(S3UploadTest, OfOneRequestIsCheckedByItsMd5) {
  const std::string text = "small";
  s3_put(place_, bytes_of(text));
  const auto asked = server_.requests().at(0);
  EXPECT_EQ(asked.body, "small");
  EXPECT_EQ(asked.header("content-md5"),
            base64_text(std::as_bytes(std::span<const std::uint8_t>(md5(bytes_of(text))))));
}

TEST_F(S3UploadTest, ThatTheStoreDoesNotNameIsAnError) {
  other = [](const StubRequest&) { return stub_answer(200); };
  EXPECT_TRUE(fails(ErrorKind::kIo, {"s3://runs/a", "gives no ETag"}, [&] { s3_put(place_, {}); }));
}

TEST_F(S3UploadTest, ThatDoesNotBeginIsAnError) {
  other = [](const StubRequest&) { return stub_answer(200, "<R></R>"); };
  EXPECT_TRUE(fails(ErrorKind::kIo, {"begins no upload"}, [&] { S3Upload upload(place_); }));
}

TEST_F(S3UploadTest, PutsItsPartsTogetherInTheOrderOfTheirNumbers) {
  const std::string first = "first", second = "second";
  S3Upload upload(place_);
  upload.put(2, bytes_of(second));
  upload.put(1, bytes_of(first));
  upload.complete(11);
  const auto last = server_.requests().back();
  EXPECT_EQ(last.method, "POST");
  EXPECT_EQ(last.target, "/runs/a?uploadId=id%201");
  const auto part = [](int number, const std::string& text) {
    return fmt::format("<Part><PartNumber>{}</PartNumber><ETag>\"{}\"</ETag></Part>", number,
                       hex_text(md5(bytes_of(text))));
  };
  EXPECT_EQ(last.body, "<CompleteMultipartUpload>" + part(1, first) + part(2, second) +
                           "</CompleteMultipartUpload>");
  EXPECT_EQ(upload.kept_bytes(), 0);
}

TEST_F(S3UploadTest, ChecksPartsByCrc32WhereTheStoreKnowsIt) {
  other = [](const StubRequest& asked) {
    const bool begins = asked.method == "POST" && asked.target.ends_with("?uploads=");
    return begins ? stub_answer(200, "<R><UploadId>id</UploadId></R>",
                                {"x-amz-checksum-algorithm: CRC32"})
                  : "";
  };
  const std::string text = "123456789";
  S3Upload upload(place_);
  upload.put(1, bytes_of(text));
  upload.complete(9);
  const auto asked = server_.requests();
  EXPECT_EQ(asked.at(0).header("x-amz-checksum-algorithm"), "CRC32");
  EXPECT_EQ(asked.at(1).header("x-amz-checksum-crc32"), "y/Q5Jg==");  // 0xcbf43926
  EXPECT_EQ(asked.at(1).header("content-md5"), "");
  EXPECT_NE(asked.at(2).body.find("<ChecksumCRC32>y/Q5Jg==</ChecksumCRC32></Part>"),
            std::string::npos);
}

TEST_F(S3UploadTest, ChecksPartsByTheirMd5WhereTheStoreKnowsNothingElse) {
  const std::string text = "123456789";
  S3Upload upload(place_);
  upload.put(1, bytes_of(text));
  const auto asked = server_.requests().at(1);
  EXPECT_EQ(asked.header("content-md5"),
            base64_text(std::as_bytes(std::span<const std::uint8_t>(md5(bytes_of(text))))));
  EXPECT_EQ(asked.header("x-amz-checksum-crc32"), "");
}

TEST_F(S3UploadTest, GoesOnWithTheChecksumThatItBeganWith) {
  const std::string same = "123456789", now = "second";
  other = [&](const StubRequest& asked) {
    if (asked.method != "GET") return std::string();
    return stub_answer(200, "<L><Part><PartNumber>1</PartNumber><ETag>&quot;" +
                                hex_text(md5(bytes_of(same))) +
                                "&quot;</ETag><Size>9</Size></Part>"
                                "<ChecksumAlgorithm>CRC32</ChecksumAlgorithm></L>");
  };
  S3Upload upload(place_, "earlier");
  upload.put(1, bytes_of(same));
  upload.put(2, bytes_of(now));
  upload.complete(15);
  const auto asked = server_.requests();
  ASSERT_EQ(asked.size(), 3U);
  EXPECT_NE(asked[1].header("x-amz-checksum-crc32"), "");
  EXPECT_NE(asked[2].body.find("<ChecksumCRC32>y/Q5Jg==</ChecksumCRC32>"), std::string::npos);
}

TEST_F(S3UploadTest, KeepsThePartsThatAreThereWithTheSameBytes) {
  const std::string same = "first", now = "second";
  other = [&](const StubRequest& asked) {
    if (asked.method != "GET") return std::string();
    const bool next = asked.target.find("part-number-marker=1&") != std::string::npos;
    const auto part = [](int number, const std::string& text) {
      return fmt::format(
          "<Part><PartNumber>{}</PartNumber><ETag>&quot;{}&quot;</ETag><Size>{}</Size></Part>",
          number, hex_text(md5(bytes_of(text))), text.size());
    };
    return stub_answer(200, next ? "<L>" + part(2, "before") + "</L>"
                                 : "<L>" + part(1, "first") +
                                       "<IsTruncated>true</IsTruncated>"
                                       "<NextPartNumberMarker>1</NextPartNumberMarker></L>");
  };
  S3Upload upload(place_, "earlier");
  upload.put(1, bytes_of(same));
  upload.put(2, bytes_of(now));
  upload.complete(11);
  EXPECT_EQ(upload.kept_bytes(), 5);
  const auto asked = server_.requests();
  ASSERT_EQ(asked.size(), 4U);  // two lists, the part that changed, the end
  EXPECT_EQ(asked[2].target, "/runs/a?partNumber=2&uploadId=earlier");
  EXPECT_NE(asked[3].body.find(hex_text(md5(bytes_of(same)))), std::string::npos);
}

TEST_F(S3UploadTest, IsCompleteIfTheObjectIsThereThoughTheAnswerIsAnother) {
  const std::string text = "first";
  other = [](const StubRequest& asked) {
    if (asked.method == "HEAD") return stub_answer(200, "first", {"ETag: \"0-1\""});
    const bool end = asked.method == "POST" && !asked.target.ends_with("?uploads=");
    return end ? stub_answer(404, "<Error><Code>NoSuchUpload</Code></Error>") : "";
  };
  S3Upload upload(place_);
  upload.put(1, bytes_of(text));
  EXPECT_NO_THROW(upload.complete(5));
}

TEST_F(S3UploadTest, ThatFailsBehindAGoodStatusIsAnError) {
  const std::string text = "first";
  other = [](const StubRequest& asked) {
    if (asked.method == "HEAD") return stub_answer(404);
    const bool end = asked.method == "POST" && !asked.target.ends_with("?uploads=");
    return end ? stub_answer(200, "<Error><Code>InternalError</Code></Error>") : "";
  };
  S3Upload upload(place_);
  upload.put(1, bytes_of(text));
  EXPECT_TRUE(fails(ErrorKind::kIo, {"does not put the parts together", "InternalError"},
                    [&] { upload.complete(5); }));
}

TEST_F(S3UploadTest, AbortsQuietly) {
  other = [](const StubRequest&) { return stub_answer(403); };
  s3_abort(place_, "id 1");
  const auto asked = server_.requests().at(0);
  EXPECT_EQ(asked.method, "DELETE");
  EXPECT_EQ(asked.target, "/runs/a?uploadId=id%201");
}

TEST_F(S3UploadTest, FindsThoseThatWereNotEnded) {
  other = [](const StubRequest&) {
    return stub_answer(200,
                       "<L><Upload><Key>a/1</Key><UploadId>x</UploadId></Upload>"
                       "<Upload><Key>a/1</Key><UploadId>y</UploadId></Upload></L>");
  };
  const auto found = s3_unfinished({.bucket = "runs", .key = "a/"});
  EXPECT_EQ(found, (UnfinishedUploads{{"a/1", {"x", "y"}}}));
}

TEST_F(S3UploadTest, FindsNothingWhereTheStoreDoesNotSay) {
  other = [](const StubRequest&) { return stub_answer(403); };
  EXPECT_TRUE(s3_unfinished(place_).empty());
}

TEST_F(S3UploadTest, DeletesAlsoWhatIsNotThere) {
  other = [](const StubRequest&) { return stub_answer(204); };
  EXPECT_NO_THROW(s3_delete(place_));
  EXPECT_EQ(server_.requests().at(0).method, "DELETE");
}

}  // namespace s3_test
}  // namespace ferry::distckpt
