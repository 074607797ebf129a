// Requests over HTTP and HTTPS. Certificates are verified; redirects are followed by hand, so that
// credentials go to the host that they are for and to no other; an answer larger than expected ends
// the transfer.
//
// A request ends within a second after is_interrupted() of its thread, with Error(kCancelled).
//
// FERRY_HTTP_TIMEOUT (seconds without a byte, 30) and FERRY_HTTP_RETRIES (8) set how patient it is.
// A server that was never reached is tried four times at most.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::distckpt {

// Signs a request with AWS's Signature Version 4.
struct AwsKeys {
  std::string id{};
  std::string secret{};
  std::string session_token{};  // of temporary keys, else empty
  std::string region{};
};

struct HttpResponse {
  int status = 0;
  std::map<std::string, std::string> headers{};  // names in lower case
  std::string body{};  // unless it went to HttpRequest::into; of an error always
  std::string url{};   // that answered, after redirects

  std::string header(std::string_view name) const;  // empty: it has none
  std::optional<std::int64_t> number(std::string_view name) const;
  bool ok() const { return status >= 200 && status < 300; }
};

struct HttpRequest {
  std::string method = "GET";  // or HEAD, PUT, POST, DELETE
  std::string url{};
  std::vector<std::string> headers{};  // "Name: value"; not sent to another host
  std::string bearer{};                // a token
  std::optional<AwsKeys> aws{};
  std::span<const std::byte> body{};
  std::int64_t max_body = std::int64_t{1} << 20;  // bytes of an answer
  // For the whole of it, instead of FERRY_HTTP_TIMEOUT; 0: none.
  std::chrono::milliseconds timeout{0};
  // The server must not be asked twice: a connection that breaks off is an error, and none is used
  // that has lain idle for a while, which the server may just close.
  bool once = false;
  std::stop_token stop{};  // ends it within a second

  // The body of a good answer goes here instead. One that is longer is an error.
  std::span<std::byte> into{};
  // Called once with the status and headers of a good answer, before its body. Throws to refuse it.
  std::function<void(const HttpResponse&)> accept{};
};

// The outcome of one try.
struct HttpAttempt {
  HttpResponse response{};
  std::int64_t received = 0;  // bytes in HttpRequest::into
  std::string failure{};      // the connection failed: libcurl says how. Empty: there is an answer
  bool again = false;         // another try may succeed
  bool unknown = false;       // the server was not reached, and never was by this process

  // "answered 503", "Connection refused", with the first words of the answer.
  std::string describe() const;
};

// Tries once. Throws what `accept` throws, Error(kIo) for an answer that is too long, for a
// redirect that leads to no HTTPS, and for certificates that are not good.
HttpAttempt http_try(const HttpRequest& request);

// Waits longer after each try that fails, by chance within bounds, so that many clients do not come
// back at once.
class Backoff {
 public:
  // Sleeps, or throws Error(kIo) naming `subject` if all tries are spent or none may succeed.
  void after(const HttpAttempt& attempt, std::string_view subject);
  void progressed() { tries_ = 0; }

 private:
  int tries_ = 0;
};

// Tries until there is an answer that another try would not change; any status but those of a
// server that is busy. Throws Error(kIo).
HttpResponse http_send(const HttpRequest& request);

// The value of an environment variable, if it is set and not empty.
std::optional<std::string> environment(const char* name);

// Percent-encodes what is not unreserved (RFC 3986) nor in `keep`.
std::string url_encode(std::string_view text, std::string_view keep = "");

// Without the query, which may hold a signature: for messages.
std::string shown_url(std::string_view url);

// "https://host:port" of a URL.
std::string_view origin_of(std::string_view url);

}  // namespace ferry::distckpt
