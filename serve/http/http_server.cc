#include "serve/http/http_server.h"

#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::serve {
namespace {

constexpr std::uint64_t kListener = 0;  // ids of events; connections have greater ones
constexpr std::uint64_t kWake = 1;
constexpr int kTick = 250;  // milliseconds
// A closed connection takes the last bytes of its client for so long: closing it with bytes unread
// would take back the response.
constexpr std::chrono::milliseconds kLinger{2000};
constexpr int kReadsPerEvent = 16;  // then others have their turn
constexpr std::size_t kReadBytes = std::size_t{64} << 10;
constexpr std::size_t kMostSent = std::size_t{1} << 20;  // to one client, before others have a turn
constexpr std::size_t kOtherDescriptors = 128;
constexpr std::size_t kSmallBody = std::size_t{1} << 20;

// Descriptors that this process may have.
std::size_t descriptor_limit() {
  rlimit limit{};
  const bool known = getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return known ? limit.rlim_cur : std::numeric_limits<std::size_t>::max();
}

std::size_t other_descriptors() {
  return std::min(kOtherDescriptors, descriptor_limit() / 2);
}

// Throws what the last call said, unless it went well.
void check_call(bool ok, std::string_view what) {
  const int error = errno;
  if (ok) return;
  std::array<char, 128> buffer{};
  fail(ErrorKind::kIo, "{}: {}", what, strerror_r(error, buffer.data(), buffer.size()));
}

void watch_fd(int epoll, int operation, int fd, std::uint64_t id, std::uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  check_call(epoll_ctl(epoll, operation, fd, &event) == 0, "epoll_ctl");
}

std::string lines_of(const HttpHeaders& headers) {
  std::string lines;
  for (const auto& [name, value] : headers) lines += fmt::format("{}: {}\r\n", name, value);
  return lines;
}

std::string head_of(int status, std::string_view content_type, const HttpHeaders& headers) {
  return fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\n", status, reason_phrase(status),
                     content_type) +
         lines_of(headers);
}

}  // namespace

void Exchange::forget_body() {
  request_.body = {};
  if (server_ == nullptr) return;
  if (auto* const connection = server_->connection_of(*this)) server_->hold(*connection, 0);
}

void Exchange::respond(HttpResponse response) {
  if (server_ == nullptr) return;
  auto head = head_of(response.status, response.content_type, response.headers);
  head += lines_of(more_headers_);
  head += fmt::format("Content-Length: {}\r\n", response.body.size());
  if (!request_.keep_alive) head += "Connection: close\r\n";
  begun_ = true;
  const bool has_body = request_.method != "HEAD";  // its client takes what follows for the next
  server_->send(*this, head + "\r\n");
  if (has_body && server_ != nullptr) server_->send(*this, std::move(response.body));
  if (server_ != nullptr) server_->finish_exchange(*this);
}

void Exchange::begin(int status, std::string_view content_type, const HttpHeaders& headers) {
  if (server_ == nullptr) return;
  chunked_ = request_.minor_version == 1;
  request_.keep_alive = request_.keep_alive && chunked_;
  auto head = head_of(status, content_type, headers) + lines_of(more_headers_);
  if (chunked_) head += "Transfer-Encoding: chunked\r\n";
  if (!request_.keep_alive) head += "Connection: close\r\n";
  begun_ = true;
  server_->send(*this, head + "\r\n");
}

void Exchange::write(std::string_view part) {
  if (server_ == nullptr || part.empty()) return;
  if (!chunked_) return server_->send(*this, std::string(part));
  server_->send(*this, fmt::format("{:x}\r\n{}\r\n", part.size(), part));
}

void Exchange::end() {
  if (server_ == nullptr) return;
  if (chunked_) server_->send(*this, "0\r\n\r\n");
  if (server_ != nullptr) server_->finish_exchange(*this);
}

void Exchange::cut() {
  if (server_ == nullptr) return;
  request_.keep_alive = false;
  server_->finish_exchange(*this);
}

std::size_t connections_within_limit(std::size_t asked) {
  return std::min(asked, descriptor_limit() - other_descriptors());
}

HttpServer::HttpServer(ServerOptions options, Handler handler, ErrorBody error_body)
    : options_(std::move(options)),
      handler_(std::move(handler)),
      error_body_(std::move(error_body)) {
  options_.max_connections = connections_within_limit(options_.max_connections);
  options_.max_held_bytes = std::max(options_.max_held_bytes, options_.limits.max_body_bytes);
  max_descriptor_ = descriptor_limit() - other_descriptors() / 2;
  epoll_ = distckpt::Descriptor(epoll_create1(EPOLL_CLOEXEC));
  wake_ = distckpt::Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  check_call(bool(epoll_) && bool(wake_), "epoll");
  listen();
  watch_fd(epoll_.get(), EPOLL_CTL_ADD, listener_.get(), kListener, EPOLLIN);
  watch_fd(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), kWake, EPOLLIN);
}

HttpServer::~HttpServer() = default;

void HttpServer::listen() {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const auto port = std::to_string(options_.port);
  const int status = getaddrinfo(options_.host.c_str(), port.c_str(), &hints, &found);
  require(status == 0, ErrorKind::kUsage, "--host {}: {}", options_.host, gai_strerror(status));
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, freeaddrinfo);
  listener_ =
      distckpt::Descriptor(socket(found->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const auto where = fmt::format("{}:{}", options_.host, options_.port);
  check_call(bool(listener_), where);
  const int yes = 1;
  setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  check_call(bind(listener_.get(), found->ai_addr, found->ai_addrlen) == 0, where);
  check_call(::listen(listener_.get(), SOMAXCONN) == 0, where);
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address), &size);
  port_ =
      ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                          : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

void HttpServer::post(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.get(), &one, sizeof one);
}

void HttpServer::stop() {
  post([this] { stopping_ = true; });
}

void HttpServer::close() {
  post([this] { closing_ = true; });
}

bool HttpServer::is_idle() const {
  return std::ranges::none_of(connections_, [](const auto& entry) {
    const auto& connection = *entry.second;
    return connection.exchange || !connection.out.empty();
  });
}

void HttpServer::run() {
  std::array<epoll_event, 512> events{};
  auto ticked = Clock::now();
  while (!closing_ && !(stopping_ && is_idle())) {
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                 ready_.empty() ? kTick : 0);
    check_call(count >= 0 || errno == EINTR, "epoll_wait");
    for (int i = 0; i < count; ++i) {
      const auto& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == kListener) {
        accept_all();
      } else if (event.data.u64 == kWake) {
        std::uint64_t ignored = 0;
        [[maybe_unused]] const auto bytes = ::read(wake_.get(), &ignored, sizeof ignored);
      } else {
        take_event(event.data.u64, event.events);
      }
    }
    std::vector<std::function<void()>> tasks;
    {
      const std::lock_guard lock(mutex_);
      tasks.swap(tasks_);
    }
    for (const auto& task : tasks) task();
    for (const auto id : std::exchange(ready_, {})) {
      const auto found = connections_.find(id);
      if (found != connections_.end()) advance(*found->second);
    }
    for (const auto id : std::exchange(unsent_, {})) {
      const auto found = connections_.find(id);
      if (found != connections_.end()) flush(*found->second);
    }
    if (Clock::now() - ticked < std::chrono::milliseconds(kTick)) continue;
    ticked = Clock::now();
    check_timeouts();
    if (on_tick_) on_tick_();
  }
  while (!connections_.empty()) drop(connections_.begin()->first);
}

void HttpServer::accept_all() {
  while (true) {
    distckpt::Descriptor socket(
        accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        watch_fd(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), kListener, 0);  // until a tick
        accepts_ = false;
      }
      return;
    }
    if (static_cast<std::size_t>(socket.get()) >= max_descriptor_) continue;  // closes it
    const int yes = 1;
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    const auto id = ++next_id_;
    const int fd = socket.get();
    auto connection = std::unique_ptr<Connection>(new Connection{
        .id = id, .socket = std::move(socket), .parser = RequestParser(options_.limits)});
    connection->since = Clock::now();
    connection->watched = EPOLLIN | EPOLLRDHUP;
    watch_fd(epoll_.get(), EPOLL_CTL_ADD, fd, id, connection->watched);
    auto& added = *connections_.emplace(id, std::move(connection)).first->second;
    if (connections_.size() > options_.max_connections || stopping_)
      refuse(added, 503, stopping_ ? "the server shuts down" : "too many connections");
  }
}

void HttpServer::take_event(std::uint64_t id, std::uint32_t events) {
  auto found = connections_.find(id);
  if (found == connections_.end()) return;
  if ((events & (EPOLLERR | EPOLLHUP)) != 0) return drop(id);
  if ((events & EPOLLIN) != 0) {
    read_from(*found->second);
    found = connections_.find(id);
    if (found == connections_.end()) return;
  }
  // A client that closes its side is gone: nobody waits for an answer behind a closed request.
  if ((events & EPOLLRDHUP) != 0 && found->second->exchange) return drop(id);
  if ((events & EPOLLOUT) != 0) flush(*found->second);
}

void HttpServer::read_from(Connection& connection) {
  const auto id = connection.id;
  for (int reads = 0; reads < kReadsPerEvent && !connection.exchange; ++reads) {
    if (connection.closes && !connection.lingers) return;
    std::array<char, kReadBytes> buffer;  // NOLINT: not worth 64 KiB of zeros
    const auto count = recv(connection.socket.get(), buffer.data(), buffer.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (count <= 0) {
      if (count == 0 && !connection.out.empty() && !connection.lingers) {
        connection.closes = true;  // the last response is still on its way
        return watch(connection);
      }
      return drop(id);
    }
    if (connection.lingers) continue;
    connection.in.append(buffer.data(), static_cast<std::size_t>(count));
    advance(connection);
    if (!connections_.contains(id)) return;
    if (static_cast<std::size_t>(count) < buffer.size()) return;
  }
}

// Reads on until a request is complete, and hands it over.
void HttpServer::advance(Connection& connection) {
  if (connection.exchange || connection.closes || connection.lingers) return;
  auto& parser = connection.parser;
  if (!parser.has_begun() && !connection.in.empty()) connection.since = Clock::now();
  connection.in.erase(0, parser.feed(connection.in));
  if (parser.refused_status() != 0)
    return refuse(connection, parser.refused_status(), parser.refusal());
  if (parser.take_head() && !parser.is_complete() && on_head_)
    if (auto refusal = on_head_(parser.request())) return refuse(connection, *std::move(refusal));
  const auto size = parser.request().body.size();
  hold(connection, size);
  if (held_bytes_ > options_.max_held_bytes && size > kSmallBody)
    return refuse(connection, 503, "the bodies of other requests take all memory that there is");
  if (parser.take_expects_continue()) {
    connection.out.add("HTTP/1.1 100 Continue\r\n\r\n");
    unsent_.insert(connection.id);
  }
  if (!parser.is_complete()) return;
  if (stopping_) return refuse(connection, 503, "the server shuts down");
  start(connection);
}

void HttpServer::start(Connection& connection) {
  auto exchange = std::make_shared<Exchange>();
  exchange->server_ = this;
  exchange->connection_ = connection.id;
  exchange->request_ = connection.parser.take();
  connection.exchange = exchange;
  try {
    handler_(exchange);
  } catch (const std::exception& error) {
    if (exchange->has_begun()) {
      exchange->cut();
    } else {
      exchange->respond({.status = 500, .body = error_body_(500, error.what())});
    }
  }
  const auto found = connections_.find(exchange->connection_);
  if (found != connections_.end()) watch(*found->second);
}

void HttpServer::refuse(Connection& connection, int status, const std::string& message) {
  refuse(connection, {.status = status, .body = error_body_(status, message)});
}

void HttpServer::refuse(Connection& connection, HttpResponse response) {
  connection.out.add(head_of(response.status, response.content_type, response.headers) +
                     fmt::format("Content-Length: {}\r\nConnection: close\r\n\r\n{}",
                                 response.body.size(), response.body));
  connection.closes = true;
  connection.parser = RequestParser(options_.limits);  // frees what has come
  connection.in = {};
  hold(connection, 0);
  unsent_.insert(connection.id);
}

void HttpServer::hold(Connection& connection, std::size_t bytes) {
  held_bytes_ += bytes - std::exchange(connection.held, bytes);
}

HttpServer::Connection* HttpServer::connection_of(const Exchange& exchange) {
  const auto found = connections_.find(exchange.connection_);
  return found == connections_.end() ? nullptr : found->second.get();
}

void HttpServer::send(Exchange& exchange, std::string bytes) {
  auto* const connection = connection_of(exchange);
  if (connection == nullptr) return;
  if (connection->out.empty()) connection->since = Clock::now();
  const bool is_part = bytes.size() <= options_.max_unsent_bytes;
  connection->out.add(std::move(bytes));
  unsent_.insert(connection->id);
  if (connection->out.size() > options_.max_unsent_bytes && is_part) drop(connection->id);
}

// The response is written: the connection is for the next request, or closes.
void HttpServer::finish_exchange(Exchange& exchange) {
  auto* const connection = connection_of(exchange);
  exchange.server_ = nullptr;
  exchange.on_gone_ = {};
  if (connection == nullptr) return;
  hold(*connection, 0);
  connection->closes = !exchange.request_.keep_alive || stopping_;
  connection->exchange.reset();
  unsent_.insert(connection->id);
  if (!connection->closes) ready_.push_back(connection->id);
}

void HttpServer::flush(Connection& connection) {
  for (auto left = kMostSent; !connection.out.empty();) {
    const auto bytes = connection.out.first().substr(0, left);
    if (bytes.empty()) return watch(connection);
    const auto count = ::send(connection.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return watch(connection);
    if (count < 0) return drop(connection.id);
    connection.out.remove(static_cast<std::size_t>(count));
    left -= static_cast<std::size_t>(count);
    connection.since = Clock::now();
  }
  if (connection.closes && !connection.lingers) {
    connection.lingers = true;
    shutdown(connection.socket.get(), SHUT_WR);
  }
  watch(connection);
}

// A connection whose response is under way is not read, only watched for its end.
void HttpServer::watch(Connection& connection) {
  std::uint32_t events = EPOLLRDHUP;
  if ((!connection.exchange && !connection.closes) || connection.lingers) events |= EPOLLIN;
  if (connection.closes && !connection.exchange && !connection.lingers) events = 0;
  if (!connection.out.empty()) events |= EPOLLOUT;
  if (events == connection.watched) return;
  connection.watched = events;
  watch_fd(epoll_.get(), EPOLL_CTL_MOD, connection.socket.get(), connection.id, events);
}

void HttpServer::drop(std::uint64_t id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  const auto connection = std::move(found->second);
  connections_.erase(found);
  hold(*connection, 0);
  if (!connection->exchange) return;
  connection->exchange->server_ = nullptr;
  const auto gone = std::exchange(connection->exchange->on_gone_, {});
  if (gone) gone();
}

void HttpServer::check_timeouts() {
  if (!accepts_) {
    watch_fd(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), kListener, EPOLLIN);
    accepts_ = true;
  }
  const auto now = Clock::now();
  std::vector<std::uint64_t> expired;
  for (const auto& [id, connection] : connections_) {
    const auto waited = now - connection->since;
    const bool is_sending = !connection->out.empty();
    if (connection->lingers              ? waited > kLinger
        : is_sending                     ? waited > options_.write_timeout
        : connection->exchange           ? false
        : connection->parser.has_begun() ? waited > options_.read_timeout
                                         : waited > options_.idle_timeout)
      expired.push_back(id);
  }
  for (const auto id : expired) {
    auto& connection = *connections_.at(id);
    if (!connection.closes && !connection.exchange && connection.parser.has_begun()) {
      connection.since = now;
      refuse(connection, 408, "the request did not come in time");
    } else {
      drop(id);
    }
  }
}

}  // namespace ferry::serve
