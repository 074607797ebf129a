#include "serve/http/request_parser.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

namespace ferry::serve {
namespace request_parser_test {

const std::string kPost =
    "POST /v1/completions?a=b%20c&d HTTP/1.1\r\nHost: x\r\nContent-Type:  text/plain \r\n"
    "Content-Length: 5\r\n\r\nhello";

RequestParser fed(std::string_view text, ParserLimits limits = {}) {
  RequestParser parser(limits);
  parser.feed(text);
  return parser;
}

int status_of(const std::string& text) {
  return fed(text).refused_status();
}

TEST(RequestParser, ReadsARequestInPartsOfAnySize) {
  for (std::size_t size = 1; size <= kPost.size(); ++size) {
    RequestParser parser({});
    for (std::size_t at = 0; at < kPost.size(); at += size)
      ASSERT_EQ(parser.feed(kPost.substr(at, size)), kPost.substr(at, size).size());
    ASSERT_TRUE(parser.is_complete());
    const auto request = parser.take();
    EXPECT_EQ(request.method + request.path + request.body, "POST/v1/completionshello");
    EXPECT_EQ(request.header("content-type"), "text/plain");
    EXPECT_EQ(request.query_value("a"), "b c");
    EXPECT_EQ(request.query_value("e"), "");
    EXPECT_TRUE(request.keep_alive);
    EXPECT_FALSE(parser.has_begun());
  }
}

TEST(RequestParser, TakesNothingOfTheNextRequest) {
  RequestParser parser({});
  EXPECT_EQ(parser.feed(kPost + kPost), kPost.size());
  EXPECT_EQ(parser.feed("more"), 0U);
}

TEST(RequestParser, JoinsChunks) {
  auto parser =
      fed("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n"
          "0123456789\r\n0\r\nTrailer: t\r\n\r\n");
  ASSERT_TRUE(parser.is_complete());
  EXPECT_EQ(parser.take().body, "abc0123456789");
}

TEST(RequestParser, KeepsAConnectionAsItsVersionSays) {
  EXPECT_FALSE(fed("GET / HTTP/1.0\r\n\r\n").take().keep_alive);
  EXPECT_TRUE(fed("GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n").take().keep_alive);
  EXPECT_FALSE(fed("GET / HTTP/1.1\r\nHost: x\r\nConnection: x, Close\r\n\r\n").take().keep_alive);
}

// RFC 9112, 3.2.2 and 3.2.4.
TEST(RequestParser, TakesTheTargetsOfProxiesAndOfTheServer) {
  const auto target_of = [](const std::string& line) {
    auto parser = fed(line + " HTTP/1.1\r\nHost: x\r\n\r\n");
    if (parser.refused_status() != 0) return std::to_string(parser.refused_status());
    const auto request = parser.take();
    return request.path + " " + request.query;
  };
  EXPECT_EQ(target_of("GET http://host:80/health?a=b"), "/health a=b");
  EXPECT_EQ(target_of("GET HTTPS://host/health"), "/health ");
  EXPECT_EQ(target_of("GET http://host"), "/ ");
  EXPECT_EQ(target_of("GET http://host?a/b"), "/ a/b");
  EXPECT_EQ(target_of("OPTIONS *"), "* ");
  for (const char* const line : {"GET *", "GET http:///health", "GET ftp://host/health", "GET ?a",
                                 "GET health", "CONNECT host:80"})
    EXPECT_EQ(target_of(line), "400") << line;
}

TEST(RequestParser, AsksForABodyThatWaits) {
  auto parser =
      fed("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n");
  EXPECT_TRUE(parser.take_expects_continue());
  EXPECT_FALSE(parser.take_expects_continue());
}

TEST(RequestParser, ShowsARequestWhoseBodyHasNotCome) {
  auto parser = fed("POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nb");
  EXPECT_TRUE(parser.take_head());
  EXPECT_FALSE(parser.take_head());
  EXPECT_EQ(parser.request().path, "/a");
  EXPECT_FALSE(parser.is_complete());
}

TEST(RequestParser, RefusesWhatTwoReadersCouldReadDifferently) {
  const std::string get = "GET / HTTP/1.1\r\nHost: x\r\n";
  EXPECT_EQ(status_of(get + "Content-Length: 3\r\nContent-Length: 3\r\n\r\n"), 400);
  EXPECT_EQ(status_of(get + "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"), 400);
  EXPECT_EQ(status_of(get + "Content-Length: +3\r\n\r\n"), 400);
  EXPECT_EQ(status_of(get + "Content-Length: 3, 3\r\n\r\n"), 400);
  EXPECT_EQ(status_of(get + "Transfer-Encoding: gzip\r\n\r\n"), 501);
  EXPECT_EQ(status_of(get + "Name : x\r\n\r\n"), 400);
  EXPECT_EQ(status_of(get + " folded: x\r\n\r\n"), 400);
  EXPECT_EQ(status_of(get + "Name: a\rb\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\nHost: x\n\n"), 400);
  EXPECT_EQ(status_of("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/1.1\r\n\r\n"), 400);
  EXPECT_EQ(status_of("GET  HTTP/1.1\r\n"), 400);
  EXPECT_EQ(status_of("GET x:/ HTTP/1.1\r\n"), 400);
  EXPECT_EQ(status_of("GET / HTTP/2.0\r\n"), 505);
  const std::string chunked = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
  EXPECT_EQ(status_of(chunked + "-1\r\n"), 400);
  EXPECT_EQ(status_of(chunked + "0x3\r\nabc\r\n"), 400);
  EXPECT_EQ(status_of(chunked + "3\r\nabcd\r\n"), 400);
  EXPECT_EQ(status_of(chunked + "FFFFFFFFFFFFFFFFF\r\n"), 400);
  EXPECT_EQ(status_of(chunked + "FFFFFFFFFFFFFFFF\r\n"), 413);
}

TEST(RequestParser, HoldsNoMoreThanItsLimits) {
  const ParserLimits limits{.max_header_bytes = 100, .max_body_bytes = 10};
  EXPECT_EQ(fed("GET /" + std::string(200, 'a'), limits).refused_status(), 431);
  EXPECT_EQ(
      fed("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n", limits).refused_status(),
      413);
  EXPECT_EQ(
      fed("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n8\r\n12345678\r\n8\r\n",
          limits)
          .refused_status(),
      413);
}

TEST(RequestParser, SurvivesAnyBytes) {
  std::mt19937 random(7);
  int complete = 0;
  for (int i = 0; i < 20000; ++i) {
    auto text = kPost;
    for (int edits = 0; edits < 3; ++edits)
      text[random() % text.size()] = static_cast<char>(random());
    RequestParser parser({});
    std::size_t at = 0;
    while (at < text.size()) {
      const auto taken = parser.feed(std::string_view(text).substr(at, 1 + random() % 20));
      if (taken == 0) break;
      at += taken;
    }
    complete += parser.is_complete() ? 1 : 0;
    EXPECT_FALSE(parser.is_complete() && parser.refused_status() != 0);
  }
  EXPECT_GT(complete, 500);
  EXPECT_LT(complete, 19500);
}

TEST(HttpRequest, NamesTheSchemeOfItsKeyInAnyCase) {
  const auto has_key = [](const std::string& value) {
    return HttpRequest{.headers = {{"authorization", value}}}.has_bearer("k1");
  };
  for (const char* good : {"Bearer k1", "bearer k1", "BEARER  k1"}) EXPECT_TRUE(has_key(good));
  for (const char* bad :
       {"Bearer K1", "Bearer k12", "Bearer k", "Bearer ", "Bearerk1", "Basic k1", "", "k1"})
    EXPECT_FALSE(has_key(bad)) << bad;
}

}  // namespace request_parser_test
}  // namespace ferry::serve
