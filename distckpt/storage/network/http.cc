#include "distckpt/storage/network/http.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "distckpt/base/error.h"
#include "distckpt/base/interruption.h"
#include "distckpt/base/printable.h"
#include "distckpt/base/trimmed.h"
#include "distckpt/storage/network/curl_library.h"
#include "distckpt/storage/network/http_advice.h"

namespace ferry::distckpt {
namespace {

constexpr std::int64_t kMaxHeaderText = std::int64_t{256} << 10;
constexpr std::int64_t kMaxErrorBody = std::int64_t{64} << 10;
constexpr int kMaxRedirects = 5;
constexpr long kUnknownRetries = 3;
constexpr long kSlowBytesPerSecond = 256;
constexpr std::chrono::milliseconds kFresh{500};  // servers keep idle connections for longer
constexpr double kLongestPause = 60;              // seconds
constexpr std::chrono::milliseconds kLook{100};   // between looks for an interrupt

long setting(const char* name, long otherwise) {
  const auto text = environment(name);
  if (!text) return otherwise;
  long value = 0;
  const auto* end = text->data() + text->size();
  const auto [stop, error] = std::from_chars(text->data(), end, value);
  require(error == std::errc() && stop == end && value > 0 && value < 86400, ErrorKind::kUsage,
          "{}={}: is not a positive number", name, *text);
  return value;
}

// Handles keep their connections open: they are used again, the last one first.
class HandlePool {
 public:
  using Clock = std::chrono::steady_clock;
  struct Free {
    CURL* handle = nullptr;
    Clock::time_point since = Clock::now();
  };

  Free take() {
    {
      const std::lock_guard lock(mutex_);
      if (process_ != getpid()) free_.clear();  // after fork they are the other process's
      process_ = getpid();
      if (!free_.empty()) {
        const auto last = free_.back();
        free_.pop_back();
        return last;
      }
    }
    CURL* handle = curl_library().easy_init();
    require(handle != nullptr, ErrorKind::kIo, "libcurl: out of memory");
    return {.handle = handle};
  }
  void give(CURL* handle) {
    curl_library().easy_reset(handle);
    const std::lock_guard lock(mutex_);
    free_.push_back({.handle = handle});
  }

 private:
  std::mutex mutex_;
  std::vector<Free> free_;
  pid_t process_ = getpid();
};

// Connections belong to the process, and end with it.
HandlePool& pool() {
  static auto* const handles = new HandlePool;
  return *handles;
}

struct GiveBack {
  void operator()(CURL* handle) const { pool().give(handle); }
};
struct FreeList {
  void operator()(curl_slist* list) const { curl_library().slist_free_all(list); }
};
using HeaderList = std::unique_ptr<curl_slist, FreeList>;

void append(HeaderList& list, const std::string& header) {
  auto* const longer = curl_library().slist_append(list.get(), header.c_str());
  require(longer != nullptr, ErrorKind::kIo, "libcurl: out of memory");
  static_cast<void>(list.release());
  list.reset(longer);
}

std::string lower(std::string_view text) {
  std::string lowered(text);
  for (auto& c : lowered) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return lowered;
}

// One request on one handle. Exceptions do not cross libcurl: callbacks keep them and end it.
struct Transfer {
  const HttpRequest* request = nullptr;
  HttpResponse response{};
  std::int64_t received = 0;
  std::int64_t header_bytes = 0;
  std::size_t sent = 0;
  bool accepted = false;
  bool interrupted = false;
  std::exception_ptr failure{};

  template <typename Body>
  bool guard(Body&& body) {
    try {
      body();
      return true;
    } catch (...) {
      failure = std::current_exception();
      return false;
    }
  }

  void accept() {
    if (accepted || !response.ok()) return;
    accepted = true;
    const auto encoding = lower(response.header("content-encoding"));
    require(encoding.empty() || encoding == "identity", ErrorKind::kIo,
            "{}: sends {} where plain bytes were asked for", shown_url(request->url),
            printable(encoding));
    if (request->accept) request->accept(response);
  }

  void take_header(std::string_view line) {
    header_bytes += static_cast<std::int64_t>(line.size());
    require(header_bytes <= kMaxHeaderText, ErrorKind::kIo, "{}: sends endless headers",
            shown_url(request->url));
    if (line.starts_with("HTTP/")) {  // of an answer such as 100 Continue before the last one
      response.headers.clear();
      const auto space = line.find(' ');
      if (space != std::string_view::npos)
        std::from_chars(line.data() + space + 1, line.data() + line.size(), response.status);
      return;
    }
    const auto colon = line.find(':');
    if (colon == std::string_view::npos) return;
    response.headers[lower(trimmed(line.substr(0, colon)))] = trimmed(line.substr(colon + 1));
  }

  void take_body(std::span<const char> bytes) {
    accept();
    const auto count = static_cast<std::int64_t>(bytes.size());
    if (response.ok() && !request->into.empty()) {
      require(count <= static_cast<std::int64_t>(request->into.size()) - received, ErrorKind::kIo,
              "{}: sends more than the {} bytes that were asked for", shown_url(request->url),
              request->into.size());
      std::memcpy(request->into.data() + received, bytes.data(), bytes.size());
      received += count;
      return;
    }
    const auto have = static_cast<std::int64_t>(response.body.size());
    const auto limit = response.ok() ? request->max_body : kMaxErrorBody;
    if (!response.ok() && have + count > limit) return;
    require(have + count <= limit, ErrorKind::kIo,
            "{}: sends more than {} bytes, which is too many", shown_url(request->url), limit);
    response.body.append(bytes.data(), bytes.size());
  }

  static std::size_t on_header(char* data, std::size_t, std::size_t size, void* self) {
    auto& transfer = *static_cast<Transfer*>(self);
    return transfer.guard([&] { transfer.take_header({data, size}); }) ? size : 0;
  }
  static std::size_t on_body(char* data, std::size_t, std::size_t size, void* self) {
    auto& transfer = *static_cast<Transfer*>(self);
    return transfer.guard([&] { transfer.take_body({data, size}); }) ? size : 0;
  }
  static std::size_t on_send(char* into, std::size_t, std::size_t size, void* self) {
    auto& transfer = *static_cast<Transfer*>(self);
    const auto& body = transfer.request->body;
    const auto count = std::min(size, body.size() - transfer.sent);
    std::memcpy(into, body.data() + transfer.sent, count);
    transfer.sent += count;
    return count;
  }
  // Called where a connection that was open turns out to be dead.
  static int on_seek(void* self, curl_off_t offset, int) {
    auto& transfer = *static_cast<Transfer*>(self);
    if (transfer.request->once) return CURL_SEEKFUNC_FAIL;
    transfer.sent = static_cast<std::size_t>(offset);
    return CURL_SEEKFUNC_OK;
  }
  static int on_progress(void* self, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
    auto& transfer = *static_cast<Transfer*>(self);
    transfer.interrupted = is_interrupted();
    return transfer.interrupted || transfer.request->stop.stop_requested() ? 1 : 0;
  }
};

bool is_busy(int status) {
  return status == 408 || status == 425 || status == 429 || status == 500 || status == 502 ||
         status == 503 || status == 504;
}

// A server that cannot be believed, or an address that is wrong, is so the next time, too.
bool is_final(CURLcode code) {
  switch (code) {
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_URL_MALFORMAT:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_ISSUER_ERROR:
    case CURLE_OUT_OF_MEMORY:
      return true;
    default:
      return false;
  }
}

template <typename Value>
void set(CURL* handle, CURLoption option, Value value, const char* what) {
  const auto code = curl_library().easy_setopt(handle, option, value);
  require(code == CURLE_OK, ErrorKind::kIo, "{}: {} is missing ({})", curl_library().version(),
          what, curl_library().easy_strerror(code));
}

void set_up(CURL* handle, Transfer& transfer, const HeaderList& headers, char* message) {
  const auto& request = *transfer.request;
  const auto option = [&](CURLoption name, auto value) { set(handle, name, value, "an option"); };
  option(CURLOPT_URL, request.url.c_str());
  option(CURLOPT_NOSIGNAL, 1L);
  option(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
  option(CURLOPT_FOLLOWLOCATION, 0L);
  option(CURLOPT_ERRORBUFFER, message);
  option(CURLOPT_CONNECTTIMEOUT, 10L);
  if (request.timeout.count() > 0) {
    option(CURLOPT_TIMEOUT_MS, static_cast<long>(request.timeout.count()));
  } else {
    option(CURLOPT_LOW_SPEED_LIMIT, kSlowBytesPerSecond);
    option(CURLOPT_LOW_SPEED_TIME, setting("FERRY_HTTP_TIMEOUT", 30));
  }
  option(CURLOPT_NOPROGRESS, 0L);
  option(CURLOPT_XFERINFOFUNCTION, &Transfer::on_progress);
  option(CURLOPT_XFERINFODATA, &transfer);
  option(CURLOPT_BUFFERSIZE, 512L << 10);
  option(CURLOPT_UPLOAD_BUFFERSIZE, 1L << 20);
  option(CURLOPT_HEADERFUNCTION, &Transfer::on_header);
  option(CURLOPT_HEADERDATA, &transfer);
  option(CURLOPT_WRITEFUNCTION, &Transfer::on_body);
  option(CURLOPT_WRITEDATA, &transfer);
  if (headers) option(CURLOPT_HTTPHEADER, headers.get());
  for (const auto* name : {"CURL_CA_BUNDLE", "SSL_CERT_FILE"}) {
    const auto file = environment(name);
    if (!file) continue;
    option(CURLOPT_CAINFO, file->c_str());
    break;
  }
  if (request.aws) {
    set(handle, CURLOPT_AWS_SIGV4, fmt::format("aws:amz:{}:s3", request.aws->region).c_str(),
        "signing for S3, which came with libcurl 7.75,");
    option(CURLOPT_USERNAME, request.aws->id.c_str());
    option(CURLOPT_PASSWORD, request.aws->secret.c_str());
  }
  if (request.method == "HEAD") option(CURLOPT_NOBODY, 1L);
  if (request.method == "PUT" || request.method == "POST") {
    option(CURLOPT_UPLOAD, 1L);
    option(CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(request.body.size()));
    option(CURLOPT_READFUNCTION, &Transfer::on_send);
    option(CURLOPT_READDATA, &transfer);
    option(CURLOPT_SEEKFUNCTION, &Transfer::on_seek);
    option(CURLOPT_SEEKDATA, &transfer);
  }
  if (request.method != "GET" && request.method != "HEAD" && request.method != "PUT")
    option(CURLOPT_CUSTOMREQUEST, request.method.c_str());
}

bool is_unreached(CURLcode code) {
  return code == CURLE_COULDNT_CONNECT || code == CURLE_COULDNT_RESOLVE_HOST;
}

// The servers that this process has reached.
class ReachedServers {
 public:
  void add(std::string_view origin) {
    const std::lock_guard lock(mutex_);
    if (!origins_.contains(origin)) origins_.emplace(origin);
  }
  bool contains(std::string_view origin) {
    const std::lock_guard lock(mutex_);
    return origins_.contains(origin);
  }

 private:
  std::mutex mutex_;
  std::set<std::string, std::less<>> origins_;
};

ReachedServers& reached_servers() {
  static ReachedServers servers;
  return servers;
}

HttpAttempt exchange(const HttpRequest& request) {
  const auto free = pool().take();
  std::unique_ptr<CURL, GiveBack> handle(free.handle);
  Transfer transfer{.request = &request};
  transfer.response.url = request.url;
  HeaderList headers;
  for (const auto& header : request.headers) append(headers, header);
  if (!request.bearer.empty()) append(headers, "Authorization: Bearer " + request.bearer);
  if (request.aws && !request.aws->session_token.empty())
    append(headers, "x-amz-security-token: " + request.aws->session_token);
  if (!request.body.empty()) append(headers, "Expect:");
  std::array<char, CURL_ERROR_SIZE> message{};
  set_up(handle.get(), transfer, headers, message.data());
  if (request.once && HandlePool::Clock::now() - free.since > kFresh)
    set(handle.get(), CURLOPT_FRESH_CONNECT, 1L, "an option");
  const auto code = curl_library().easy_perform(handle.get());
  // A handle whose transfer broke off is not used again: where a name was not found, libcurl 7.88
  // refuses to set options of it.
  if (code != CURLE_OK) curl_library().easy_cleanup(handle.release());
  if (transfer.failure) std::rethrow_exception(transfer.failure);
  require(!transfer.interrupted, ErrorKind::kCancelled, "interrupted");
  if (code == CURLE_OK) transfer.accept();  // of an answer without a body
  HttpAttempt attempt{.response = std::move(transfer.response), .received = transfer.received};
  if (code != CURLE_OK) {
    const bool broke_off =
        request.once && (code == CURLE_GOT_NOTHING || code == CURLE_SEND_FAIL_REWIND);
    attempt.failure =
        broke_off
            ? "the connection broke off before an answer"
            : printable(message[0] != '\0' ? message.data() : curl_library().easy_strerror(code));
    attempt.again = !is_final(code);
    attempt.unknown = is_unreached(code) && !reached_servers().contains(origin_of(request.url));
  } else {
    reached_servers().add(origin_of(request.url));
    attempt.again = is_busy(attempt.response.status);
  }
  return attempt;
}

// The address that a redirect names, relative to the one that was asked.
std::string redirect_target(const std::string& url, const std::string& location) {
  const auto colon = location.find("://");
  if (colon != std::string::npos && colon < location.find_first_of("/?#", 0)) return location;
  if (location.starts_with("//"))
    return fmt::format("{}{}", url.substr(0, url.find(':') + 1), location);
  if (location.starts_with('/')) return fmt::format("{}{}", origin_of(url), location);
  const auto path = url.substr(0, url.find('?'));
  return path.substr(0, path.rfind('/') + 1) + location;
}

}  // namespace

std::string HttpResponse::header(std::string_view name) const {
  const auto at = headers.find(std::string(name));
  return at == headers.end() ? std::string() : at->second;
}

std::optional<std::int64_t> HttpResponse::number(std::string_view name) const {
  const auto text = header(name);
  std::int64_t value = 0;
  const auto* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (text.empty() || error != std::errc() || stop != end || value < 0) return std::nullopt;
  return value;
}

std::string HttpAttempt::describe() const {
  if (!failure.empty()) return failure;
  auto words = response.body.substr(0, 200);
  // S3 tells the reason between tags.
  if (const auto at = response.body.find("<Code>"); at != std::string::npos)
    words = response.body.substr(at + 6, response.body.find("</Code>", at) - at - 6).substr(0, 80);
  for (auto& c : words) {
    if (c == '\n' || c == '\r' || c == '\t') c = ' ';
  }
  return fmt::format("the server answered {}{}{}", response.status, words.empty() ? "" : ": ",
                     printable(trimmed(words)));
}

HttpAttempt http_try(const HttpRequest& request) {
  auto current = request;
  for (int i = 0; i < kMaxRedirects; ++i) {
    auto attempt = exchange(current);
    const auto status = attempt.response.status;
    const bool redirected = attempt.failure.empty() && status >= 301 && status <= 308 &&
                            status != 304 && !attempt.response.header("location").empty();
    // S3 redirects to other regions, where the signature would not hold.
    if (!redirected || current.aws || current.method == "PUT" || current.method == "POST")
      return attempt;
    auto next = redirect_target(current.url, attempt.response.header("location"));
    const bool secure = next.starts_with("https://");
    require(secure || (next.starts_with("http://") && current.url.starts_with("http://")),
            ErrorKind::kIo, "{}: redirects to {}, which is not HTTPS", shown_url(current.url),
            printable(shown_url(next)));
    if (origin_of(next) != origin_of(current.url)) {
      current.bearer.clear();
      std::erase_if(current.headers,
                    [](const std::string& header) { return !lower(header).starts_with("range:"); });
    }
    current.url = std::move(next);
  }
  fail(ErrorKind::kIo, "{}: redirects in circles", shown_url(request.url));
}

void Backoff::after(const HttpAttempt& attempt, std::string_view subject) {
  const auto patience = setting("FERRY_HTTP_RETRIES", 8);
  const bool spent = ++tries_ > (attempt.unknown ? std::min(patience, kUnknownRetries) : patience);
  if (!attempt.again || spent) {
    throw Error(ErrorKind::kIo,
                fmt::format("{}: {}{}", subject, attempt.describe(),
                            attempt.again ? fmt::format(", {} times", tries_) : ""),
                advice(attempt.response));
  }
  thread_local std::minstd_rand random(std::random_device{}());
  const auto longest = std::min(10.0, 0.1 * static_cast<double>(1 << std::min(tries_, 10)));
  double seconds = std::uniform_real_distribution<double>(longest / 2, longest)(random);
  seconds = std::max(seconds, std::min(asked_pause(attempt.response).value_or(0), kLongestPause));
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    require(!is_interrupted(), ErrorKind::kCancelled, "interrupted");
    std::this_thread::sleep_for(
        std::min<std::chrono::duration<double>>(end - std::chrono::steady_clock::now(), kLook));
  }
}

HttpResponse http_send(const HttpRequest& request) {
  Backoff backoff;
  while (true) {
    auto attempt = http_try(request);
    if (attempt.failure.empty() && !attempt.again) return std::move(attempt.response);
    backoff.after(attempt, shown_url(request.url));
  }
}

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::string url_encode(std::string_view text, std::string_view keep) {
  std::string encoded;
  for (const char c : text) {
    const bool plain = (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ||
                       c == '-' || c == '.' || c == '_' || c == '~';
    if (plain || keep.find(c) != std::string_view::npos) {
      encoded += c;
    } else {
      encoded += fmt::format("%{:02X}", static_cast<unsigned char>(c));
    }
  }
  return encoded;
}

std::string shown_url(std::string_view url) {
  return std::string(url.substr(0, url.find_first_of("?#")));
}

std::string_view origin_of(std::string_view url) {
  const auto host = url.find("://");
  if (host == std::string_view::npos) return url;
  return url.substr(0, url.find_first_of("/?#", host + 3));
}

}  // namespace ferry::distckpt
