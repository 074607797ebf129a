#include "distckpt/storage/network/http.h"

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <semaphore>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "distckpt/base/encodings.h"
#include "distckpt/base/error.h"
#include "tests/support/expect.h"
#include "tests/support/remote/environment.h"
#include "tests/support/remote/stub_server.h"

namespace ferry::distckpt {
namespace http_test {

using support::Environment;
using support::fails;
using support::stub_answer;
using support::StubRequest;
using support::StubServer;

const auto kSayHello = [](const StubRequest&) { return stub_answer(200, "hello"); };

TEST(HttpResponse, NumbersAreWholeAndNotNegative) {
  const HttpResponse response{
      .headers = {{"size", "12"}, {"junk", "12x"}, {"minus", "-1"}, {"empty", ""}}};
  EXPECT_EQ(response.number("size"), 12);
  for (const auto* name : {"junk", "minus", "empty", "absent"})
    EXPECT_EQ(response.number(name), std::nullopt) << name;
}

TEST(Url, ComesBackFromItsEncoding) {
  const std::string name = "a b/ü%&=~-._+";
  EXPECT_EQ(url_encode(name), "a%20b%2F%C3%BC%25%26%3D~-._%2B");
  EXPECT_EQ(url_encode(name, "/"), "a%20b/%C3%BC%25%26%3D~-._%2B");
  EXPECT_EQ(percent_decoded(url_encode(name)), name);
}

TEST(Url, ThatIsNotWellEncodedStaysAsItIs) {
  for (const auto* text : {"100%", "%4", "%zz", "%-1"}) EXPECT_EQ(percent_decoded(text), text);
}

TEST(Url, IsShownWithoutItsQuery) {
  EXPECT_EQ(shown_url("https://host/a?Signature=secret"), "https://host/a");
  EXPECT_EQ(shown_url("https://host/a#b"), "https://host/a");
}

TEST(Url, HasAnOrigin) {
  EXPECT_EQ(origin_of("http://host:80/a/b"), "http://host:80");
  EXPECT_EQ(origin_of("http://host?q"), "http://host");
  EXPECT_EQ(origin_of("http://host"), "http://host");
  EXPECT_EQ(origin_of("no address"), "no address");
}

TEST(HttpAttempt, TellsTheReasonThatS3GivesBetweenTags) {
  HttpAttempt attempt{.response = {.status = 403, .body = "<Error><Code>AccessDenied</Code>..."}};
  EXPECT_EQ(attempt.describe(), "the server answered 403: AccessDenied");
  attempt.response.body = "no\nway\x1b[2J";
  EXPECT_EQ(attempt.describe(), "the server answered 403: no way\\x1b[2J");
  attempt.failure = "Connection refused";
  EXPECT_EQ(attempt.describe(), "Connection refused");
}

TEST(HttpSend, GivesTheBodyAndTheHeadersInLowerCase) {
  const StubServer server(
      [](const StubRequest&) { return stub_answer(200, "hello", {"X-Said:  twice and more  "}); });
  const auto response = http_send({.url = server.url() + "/a?b=c", .headers = {"X-Asked: yes"}});
  EXPECT_EQ(response.status, 200);
  EXPECT_EQ(response.body, "hello");
  EXPECT_EQ(response.header("x-said"), "twice and more");
  EXPECT_EQ(response.url, server.url() + "/a?b=c");
  const auto asked = server.requests().at(0);
  EXPECT_EQ(asked.method, "GET");
  EXPECT_EQ(asked.target, "/a?b=c");
  EXPECT_EQ(asked.header("x-asked"), "yes");
}

TEST(HttpSend, AsksABusyServerAgain) {
  const Environment quick{{"FERRY_HTTP_RETRIES", "1"}};
  std::atomic<int> asked = 0;
  const StubServer server([&](const StubRequest&) {
    return ++asked == 1 ? stub_answer(503, "later") : stub_answer(200, "hello");
  });
  EXPECT_EQ(http_send({.url = server.url()}).body, "hello");
  EXPECT_EQ(asked, 2);
}

TEST(HttpSend, GivesUpAServerThatStaysBusy) {
  const Environment quick{{"FERRY_HTTP_RETRIES", "1"}};
  const StubServer server([](const StubRequest&) { return stub_answer(503, "later"); });
  EXPECT_TRUE(fails(ErrorKind::kIo, {server.url(), "answered 503: later", "2 times"},
                    [&] { http_send({.url = server.url() + "/?secret"}); }));
  EXPECT_EQ(server.requests().size(), 2U);
}

TEST(HttpSend, TakesNotFoundForAnAnswer) {
  const StubServer server([](const StubRequest&) { return stub_answer(404, "nothing here"); });
  const auto response = http_send({.url = server.url()});
  EXPECT_EQ(response.status, 404);
  EXPECT_EQ(response.body, "nothing here");
  EXPECT_EQ(server.requests().size(), 1U);
}

TEST(HttpSend, SaysWhichSettingIsNoNumber) {
  const StubServer server([](const StubRequest&) { return stub_answer(500); });
  const Environment wrong{{"FERRY_HTTP_RETRIES", "often"}};
  EXPECT_TRUE(fails(ErrorKind::kUsage, {"FERRY_HTTP_RETRIES=often"},
                    [&] { http_send({.url = server.url()}); }));
}

TEST(HttpSend, SendsABodyWithItsLength) {
  const StubServer server(kSayHello);
  const std::string body(3 << 20, 'x');
  http_send({.method = "PUT", .url = server.url(), .body = std::as_bytes(std::span(body))});
  const auto asked = server.requests().at(0);
  EXPECT_EQ(asked.method, "PUT");
  EXPECT_EQ(asked.body, body);
}

TEST(HttpTry, SaysThatNobodyListens) {
  std::string url;
  {
    const StubServer server(kSayHello);
    url = server.url();
  }
  const auto attempt = http_try({.url = url});
  EXPECT_NE(attempt.failure.find("connect"), std::string::npos) << attempt.failure;
  EXPECT_TRUE(attempt.again);
  EXPECT_TRUE(attempt.unknown);
}

TEST(HttpTry, AsksNoSecondTimeForWhatMustBeAskedOnce) {
  const StubServer server([](const StubRequest&) { return std::string(); });
  const std::string body = "order";
  const auto attempt = http_try({.method = "POST",
                                 .url = server.url(),
                                 .body = std::as_bytes(std::span(body)),
                                 .once = true});
  EXPECT_EQ(attempt.failure, "the connection broke off before an answer");
  EXPECT_EQ(server.requests().size(), 1U);
}

TEST(HttpTry, EndsSoonAfterItIsToldToStop) {
  std::binary_semaphore ended(0);
  std::binary_semaphore asked(0);
  const StubServer server([&](const StubRequest&) {
    asked.release();
    ended.acquire();
    return std::string();
  });
  std::stop_source stop;
  std::jthread teller([&] {
    asked.acquire();
    stop.request_stop();
  });
  const auto attempt = http_try({.url = server.url(), .stop = stop.get_token()});
  ended.release();
  EXPECT_FALSE(attempt.failure.empty());
}

TEST(HttpTry, EndsAtItsTimeout) {
  std::binary_semaphore ended(0);
  const StubServer server([&](const StubRequest&) {
    ended.acquire();
    return std::string();
  });
  const auto attempt = http_try({.url = server.url(), .timeout = std::chrono::milliseconds(50)});
  ended.release();
  EXPECT_FALSE(attempt.failure.empty());
  EXPECT_TRUE(attempt.again);
}

// Redirects.

TEST(HttpRedirect, LeadsBesideTheAddressOrToItsRoot) {
  const StubServer server([](const StubRequest& asked) {
    if (asked.target == "/a/b?q") return stub_answer(302, "", {"Location: c"});
    if (asked.target == "/a/c") return stub_answer(307, "", {"Location: /d"});
    return stub_answer(200, asked.target);
  });
  const auto response = http_send({.url = server.url() + "/a/b?q"});
  EXPECT_EQ(response.body, "/d");
  EXPECT_EQ(response.url, server.url() + "/d");
}

TEST(HttpRedirect, TakesCredentialsToTheSameServerOnly) {
  const StubServer other(kSayHello);
  const StubServer server([&](const StubRequest& asked) {
    if (asked.target == "/here") return stub_answer(302, "", {"Location: /there"});
    return stub_answer(302, "", {"Location: " + other.url() + "/far"});
  });
  http_send({.url = server.url() + "/here",
             .headers = {"Range: bytes=0-9", "X-Secret: word"},
             .bearer = "token"});
  const auto there = server.requests().at(1);
  EXPECT_EQ(there.target, "/there");
  EXPECT_EQ(there.header("authorization"), "Bearer token");
  EXPECT_EQ(there.header("x-secret"), "word");
  const auto far = other.requests().at(0);
  EXPECT_EQ(far.header("authorization"), "");
  EXPECT_EQ(far.header("x-secret"), "");
  EXPECT_EQ(far.header("range"), "bytes=0-9");
}

TEST(HttpRedirect, InCirclesIsAnError) {
  const StubServer server(
      [](const StubRequest&) { return stub_answer(302, "", {"Location: /again"}); });
  EXPECT_TRUE(
      fails(ErrorKind::kIo, {"redirects in circles"}, [&] { http_send({.url = server.url()}); }));
}

TEST(HttpRedirect, ToAnotherSchemeIsAnError) {
  const StubServer server(
      [](const StubRequest&) { return stub_answer(302, "", {"Location: file:///etc/passwd"}); });
  EXPECT_TRUE(fails(ErrorKind::kIo, {"redirects to file:///etc/passwd", "not HTTPS"},
                    [&] { http_send({.url = server.url()}); }));
}

TEST(HttpRedirect, IsNotFollowedWithWhatIsSent) {
  const StubServer server(
      [](const StubRequest&) { return stub_answer(307, "", {"Location: /elsewhere"}); });
  EXPECT_EQ(http_send({.method = "PUT", .url = server.url()}).status, 307);
  EXPECT_EQ(server.requests().size(), 1U);
}

// Answers that are not what was asked for.

TEST(HttpAnswer, LongerThanAllowedIsAnError) {
  const StubServer server([](const StubRequest&) { return stub_answer(200, "0123456789"); });
  EXPECT_EQ(http_send({.url = server.url(), .max_body = 10}).body.size(), 10U);
  EXPECT_TRUE(fails(ErrorKind::kIo, {"more than 9 bytes"},
                    [&] { http_send({.url = server.url(), .max_body = 9}); }));
}

TEST(HttpAnswer, OfAnErrorThatIsLongIsCut) {
  const StubServer server(
      [](const StubRequest&) { return stub_answer(400, std::string(1 << 20, 'x')); });
  const auto response = http_send({.url = server.url(), .max_body = 10});
  EXPECT_EQ(response.status, 400);
  EXPECT_LE(response.body.size(), std::size_t{64} << 10);
}

TEST(HttpAnswer, GoesIntoTheMemoryThatWasGiven) {
  const StubServer server([](const StubRequest&) { return stub_answer(200, "0123456789"); });
  std::string into(12, '-');
  const auto attempt =
      http_try({.url = server.url(), .into = std::as_writable_bytes(std::span(into))});
  EXPECT_EQ(into, "0123456789--");
  EXPECT_EQ(attempt.received, 10);
  EXPECT_EQ(attempt.response.body, "");
}

TEST(HttpAnswer, LongerThanTheMemoryThatWasGivenIsAnError) {
  const StubServer server([](const StubRequest&) { return stub_answer(200, "0123456789"); });
  std::string into(12, '-');
  const auto room = std::as_writable_bytes(std::span(into)).first(4);
  EXPECT_TRUE(fails(ErrorKind::kIo, {"more than the 4 bytes"},
                    [&] { http_try({.url = server.url(), .into = room}); }));
  EXPECT_EQ(into.substr(4), "--------");
}

TEST(HttpAnswer, CutShortIsSaidWithWhatCame) {
  const StubServer server([](const StubRequest&) {
    return std::string("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n0123");
  });
  std::string into(10, '-');
  const auto attempt =
      http_try({.url = server.url(), .into = std::as_writable_bytes(std::span(into))});
  EXPECT_EQ(attempt.received, 4);
  EXPECT_FALSE(attempt.failure.empty());
  EXPECT_TRUE(attempt.again);
}

TEST(HttpAnswer, CompressedIsAnError) {
  const StubServer server(
      [](const StubRequest&) { return stub_answer(200, "x", {"Content-Encoding: gzip"}); });
  EXPECT_TRUE(fails(ErrorKind::kIo, {"sends gzip where plain bytes"},
                    [&] { http_send({.url = server.url()}); }));
}

TEST(HttpAnswer, WithEndlessHeadersIsAnError) {
  const StubServer server([](const StubRequest&) {
    return stub_answer(200, "", std::vector<std::string>(300, "X-More: " + std::string(1000, 'x')));
  });
  EXPECT_TRUE(
      fails(ErrorKind::kIo, {"endless headers"}, [&] { http_send({.url = server.url()}); }));
}

TEST(HttpAnswer, IsJudgedByItsHeadersBeforeItsBody) {
  const StubServer server([](const StubRequest&) { return stub_answer(200, "body", {"ETag: a"}); });
  std::vector<std::string> seen;
  const auto accept = [&](const HttpResponse& response) {
    seen.push_back(response.header("etag") + response.body);
  };
  EXPECT_EQ(http_send({.url = server.url(), .accept = accept}).body, "body");
  EXPECT_EQ(seen, std::vector<std::string>{"a"});
}

TEST(HttpAnswer, ThatIsRefusedEndsWithTheRefusal) {
  const StubServer server(kSayHello);
  const auto refuse = [](const HttpResponse&) { throw std::range_error("not this one"); };
  EXPECT_THROW(http_send({.url = server.url(), .accept = refuse}), std::range_error);
  EXPECT_EQ(http_send({.url = server.url()}).body, "hello");  // the handle is as good as new
}

TEST(HttpAnswer, OfAnErrorIsNotJudged) {
  const StubServer server([](const StubRequest&) { return stub_answer(404); });
  const auto refuse = [](const HttpResponse&) { throw std::range_error("not this one"); };
  EXPECT_EQ(http_send({.url = server.url(), .accept = refuse}).status, 404);
}

}  // namespace http_test
}  // namespace ferry::distckpt
