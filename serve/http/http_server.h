// An HTTP/1.1 server on one thread: an event loop over epoll. A connection costs its buffers and no
// thread, so that thousands may wait for answers; a client that goes is noticed while its answer is
// made, not only when it is written.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "serve/http/message.h"
#include "serve/http/request_parser.h"
#include "serve/http/unsent_bytes.h"

namespace ferry::serve {

struct ServerOptions {
  std::string host = "127.0.0.1";
  int port = 8000;                     // 0: any that is free
  std::size_t max_connections = 4096;  // or connections_within_limit()
  ParserLimits limits{};
  // The bodies of all requests that have not come whole or have not been read yet; beyond it, those
  // of more than a MiB get status 503.
  std::size_t max_held_bytes = std::size_t{1} << 30;
  std::size_t max_unsent_bytes = std::size_t{16} << 20;  // of a stream whose client reads slowly
  std::chrono::milliseconds idle_timeout{75'000};        // of a connection without a request
  std::chrono::milliseconds read_timeout{60'000};        // from a request's first byte to its last
  std::chrono::milliseconds write_timeout{60'000};       // in which a client reads nothing
};

// The connections that were asked for, or fewer where `ulimit -n` leaves fewer descriptors beside
// those of checkpoints, tools and other engines.
std::size_t connections_within_limit(std::size_t asked);

class HttpServer;

// A request and the way to its response: whole by respond(), or in parts by begin(), write() and
// end(). Used on the server's thread. Without effect once the client is gone.
class Exchange {
 public:
  const HttpRequest& request() const { return request_; }
  // Neither the client has gone nor the response has ended.
  bool is_open() const { return server_ != nullptr; }
  bool has_begun() const { return begun_; }

  // Frees the body of the request, once it has been read.
  void forget_body();
  // Headers of any response to come, beside its own.
  void add_headers(HttpHeaders headers) { more_headers_ = std::move(headers); }
  void respond(HttpResponse response);
  void begin(int status, std::string_view content_type, const HttpHeaders& headers = {});
  void write(std::string_view part);
  void end();
  // Ends a stream in its middle: the client sees that it is cut short.
  void cut();

  // Called once if the client goes before the response has ended.
  void on_gone(std::function<void()> callback) { on_gone_ = std::move(callback); }

 private:
  friend class HttpServer;

  HttpServer* server_ = nullptr;
  std::uint64_t connection_ = 0;
  bool begun_ = false;
  bool chunked_ = true;
  HttpRequest request_{};
  HttpHeaders more_headers_{};
  std::function<void()> on_gone_{};
};

class HttpServer {
 public:
  using Handler = std::function<void(std::shared_ptr<Exchange>)>;
  // Looks at a request whose body has not come: with a response it is refused, and its connection
  // closes.
  using HeadCheck = std::function<std::optional<HttpResponse>(const HttpRequest&)>;
  // The body of a refusal that the server makes itself.
  using ErrorBody = std::function<std::string(int status, const std::string& message)>;

  // Listens at once. Throws Error(kIo) if the address cannot be had.
  HttpServer(ServerOptions options, Handler handler, ErrorBody error_body);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  int port() const { return port_; }

  // Serves until stop() was called, then waits for responses under way until close() is called.
  void run();

  // Thread-safe. Runs a task on the server's thread, soon.
  void post(std::function<void()> task);
  // Thread-safe. Takes no new connections nor requests; run() returns when all responses are sent.
  void stop();
  // Thread-safe. run() returns at once, and drops what is under way.
  void close();

  void on_head(HeadCheck check) { on_head_ = std::move(check); }
  // Called on the server's thread about four times a second.
  void on_tick(std::function<void()> callback) { on_tick_ = std::move(callback); }

 private:
  friend class Exchange;
  using Clock = std::chrono::steady_clock;

  struct Connection {
    std::uint64_t id = 0;
    distckpt::Descriptor socket{};
    RequestParser parser;
    std::string in{};  // bytes behind the request under way
    UnsentBytes out{};
    std::shared_ptr<Exchange> exchange{};
    bool closes = false;   // after out is sent
    bool lingers = false;  // out is sent: only what the client still sends is thrown away
    std::uint32_t watched = 0;
    std::size_t held = 0;       // bytes of a body
    Clock::time_point since{};  // of the state that a timeout limits
  };

  void listen();
  void accept_all();
  void take_event(std::uint64_t id, std::uint32_t events);
  void read_from(Connection& connection);
  void advance(Connection& connection);
  void start(Connection& connection);
  void refuse(Connection& connection, int status, const std::string& message);
  void refuse(Connection& connection, HttpResponse response);
  void hold(Connection& connection, std::size_t bytes);
  void flush(Connection& connection);
  void watch(Connection& connection);
  void drop(std::uint64_t id);
  void check_timeouts();
  void finish_exchange(Exchange& exchange);
  Connection* connection_of(const Exchange& exchange);
  void send(Exchange& exchange, std::string bytes);
  bool is_idle() const;

  ServerOptions options_;
  Handler handler_;
  ErrorBody error_body_;
  HeadCheck on_head_{};
  std::function<void()> on_tick_{};
  int port_ = 0;
  distckpt::Descriptor listener_{}, epoll_{}, wake_{};
  std::size_t held_bytes_ = 0;      // of all connections
  bool accepts_ = true;             // the listener is watched
  std::size_t max_descriptor_ = 0;  // from it on a connection is closed at once
  std::uint64_t next_id_ = 2;
  std::unordered_map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::unordered_set<std::uint64_t> unsent_;  // connections with new bytes to send
  std::vector<std::uint64_t> ready_;          // connections that may have another request

  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;
  bool stopping_ = false;
  bool closing_ = false;
};

}  // namespace ferry::serve
