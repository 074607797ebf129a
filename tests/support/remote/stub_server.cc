#include "tests/support/remote/stub_server.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cctype>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <utility>

namespace ferry::support {
namespace {

void require_started(bool ok) {
  if (!ok) throw std::runtime_error("a server of a test does not start");
}

std::optional<StubRequest> read_request(int connection) {
  std::string text;
  std::array<char, 65536> buffer{};
  const auto more = [&] {
    const auto count = ::recv(connection, buffer.data(), buffer.size(), 0);
    if (count > 0) text.append(buffer.data(), static_cast<std::size_t>(count));
    return count > 0;
  };
  while (text.find("\r\n\r\n") == std::string::npos) {
    if (!more()) return std::nullopt;
  }
  const auto head_end = text.find("\r\n\r\n");
  const auto first_end = text.find("\r\n");
  const auto method_end = text.find(' ');
  const auto target_end = text.find(' ', method_end + 1);
  StubRequest request{.method = text.substr(0, method_end),
                      .target = text.substr(method_end + 1, target_end - method_end - 1)};
  for (auto at = first_end; at < head_end;) {
    at += 2;
    const auto end = text.find("\r\n", at);
    const auto colon = text.find(':', at);
    auto name = text.substr(at, colon - at);
    for (auto& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    const auto value = text.find_first_not_of(' ', colon + 1);
    request.headers[name] = text.substr(value, end - value);
    at = end;
  }
  const auto length = request.header("content-length");
  const auto whole = head_end + 4 + (length.empty() ? 0 : std::stoul(length));
  while (text.size() < whole) {
    if (!more()) return std::nullopt;
  }
  request.body = text.substr(head_end + 4);
  return request;
}

}  // namespace

std::string StubRequest::header(const std::string& name) const {
  const auto at = headers.find(name);
  return at == headers.end() ? std::string() : at->second;
}

std::string stub_answer(int status,
                        std::string_view body,
                        const std::vector<std::string>& headers) {
  auto text = fmt::format("HTTP/1.1 {} Said\r\nContent-Length: {}\r\nConnection: close\r\n", status,
                          body.size());
  for (const auto& header : headers) text += header + "\r\n";
  return text + "\r\n" + std::string(body);
}

StubServer::StubServer(Answer answer) : answer_(std::move(answer)) {
  listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  stop_ = ::eventfd(0, EFD_CLOEXEC);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  auto* const at = reinterpret_cast<sockaddr*>(&address);
  require_started(listener_ >= 0 && stop_ >= 0 && ::bind(listener_, at, size) == 0 &&
                  ::listen(listener_, 64) == 0 && ::getsockname(listener_, at, &size) == 0);
  port_ = ntohs(address.sin_port);
  thread_ = std::thread([this] { serve(); });
}

StubServer::~StubServer() {
  const std::uint64_t one = 1;
  static_cast<void>(::write(stop_, &one, sizeof(one)));
  thread_.join();
  ::close(listener_);
  ::close(stop_);
}

std::string StubServer::url() const {
  return fmt::format("http://127.0.0.1:{}", port_);
}

std::vector<StubRequest> StubServer::requests() const {
  const std::lock_guard lock(mutex_);
  return requests_;
}

void StubServer::serve() {
  while (true) {
    std::array<pollfd, 2> events{pollfd{.fd = listener_, .events = POLLIN, .revents = 0},
                                 pollfd{.fd = stop_, .events = POLLIN, .revents = 0}};
    ::poll(events.data(), events.size(), -1);
    if (events[1].revents != 0) return;
    const int connection = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection < 0) continue;
    converse(connection);
    ::close(connection);
  }
}

void StubServer::converse(int connection) {
  const auto request = read_request(connection);
  if (!request) return;
  {
    const std::lock_guard lock(mutex_);
    requests_.push_back(*request);
  }
  auto text = answer_(*request);
  if (request->method == "HEAD") text.resize(text.find("\r\n\r\n") + 4);
  for (std::string_view rest = text; !rest.empty();) {
    const auto count = ::send(connection, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count <= 0) return;
    rest.remove_prefix(static_cast<std::size_t>(count));
  }
}

}  // namespace ferry::support
