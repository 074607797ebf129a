#include "serve/http/http_server.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <string>
#include <thread>

#include "distckpt/base/error.h"

namespace ferry::serve {
namespace http_server_test {

class Client {
 public:
  explicit Client(int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const timeval patience{.tv_sec = 20, .tv_usec = 0};
    setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    EXPECT_EQ(connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  ~Client() { ::close(socket_); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void send(std::string_view text) { ::send(socket_, text.data(), text.size(), MSG_NOSIGNAL); }
  // Everything up to `last`, or to the end of the connection.
  std::string receive(std::string_view last = "") {
    std::string all;
    char byte = 0;
    while ((last.empty() || !all.ends_with(last)) && recv(socket_, &byte, 1, 0) == 1) all += byte;
    return all;
  }
  int fd() const { return socket_; }

 private:
  int socket_;
};

class HttpServerTest : public testing::Test {
 public:
  ~HttpServerTest() override {
    if (!thread_.joinable()) return;
    server_->close();
    thread_.join();
  }

 protected:
  void start(ServerOptions options = {}) {
    options.port = 0;
    server_.emplace(
        options, [this](const std::shared_ptr<Exchange>& exchange) { handle(exchange); },
        [](int status, const std::string& message) {
          return "refused " + std::to_string(status) + ": " + message;
        });
    thread_ = std::thread([this] { server_->run(); });
  }

  void handle(const std::shared_ptr<Exchange>& exchange) {
    const auto& request = exchange->request();
    if (request.path == "/echo") {
      exchange->respond({.body = request.body, .content_type = "text/plain"});
    } else if (request.path == "/parts") {
      exchange->begin(200, "text/plain");
      exchange->write("one ");
      server_->post([exchange] {
        exchange->write("two");
        exchange->end();
      });
    } else if (request.path == "/wait") {
      exchange->on_gone([this] { ++num_gone_; });
      waiting_ = exchange;
      ++num_waiting_;
    } else if (request.path == "/flood") {
      exchange->on_gone([this] { ++num_gone_; });
      exchange->begin(200, "text/plain");
      for (int i = 0; i < 1000 && exchange->is_open(); ++i)
        exchange->write(std::string(100'000, 'x'));
    } else {
      throw std::runtime_error("no such path");
    }
  }
  void until(const std::function<bool()>& condition) {
    for (int i = 0; i < 2000 && !condition(); ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_TRUE(condition());
  }
  static std::string post(const std::string& path, const std::string& body) {
    return "POST " + path +
           " HTTP/1.1\r\nHost: x\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" +
           body;
  }

  std::optional<HttpServer> server_;
  std::thread thread_;
  std::shared_ptr<Exchange> waiting_;
  std::atomic<int> num_gone_ = 0, num_waiting_ = 0;
};

TEST_F(HttpServerTest, AnswersOneRequestAfterTheOther) {
  start();
  Client client(server_->port());
  client.send(post("/echo", "first"));
  EXPECT_TRUE(client.receive("first").starts_with("HTTP/1.1 200 OK\r\n"));
  client.send(post("/echo", "second") + post("/echo", "third"));  // both at once
  client.receive("second");
  client.receive("third");
}

TEST_F(HttpServerTest, SendsPartsAsChunks) {
  start();
  Client client(server_->port());
  client.send("GET /parts HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(client.receive("0\r\n\r\n").ends_with("\r\n\r\n4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n"));
}

TEST_F(HttpServerTest, SendsPartsToHttp10UntilItCloses) {
  start();
  Client client(server_->port());
  client.send("GET /parts HTTP/1.0\r\n\r\n");
  EXPECT_TRUE(client.receive().ends_with("\r\n\r\none two"));
}

TEST_F(HttpServerTest, NoticesThatAWaitingClientGoes) {
  start();
  {
    Client client(server_->port());
    client.send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
    until([&] { return num_waiting_ == 1; });
    EXPECT_EQ(num_gone_, 0);
  }
  until([&] { return num_gone_ == 1; });
}

TEST_F(HttpServerTest, GivesUpAClientThatReadsTooSlowly) {
  start({.max_unsent_bytes = 1'000'000});
  Client client(server_->port());
  client.send("GET /flood HTTP/1.1\r\nHost: x\r\n\r\n");
  until([&] { return num_gone_ == 1; });
}

TEST_F(HttpServerTest, GivesUpAClientThatStopsReading) {
  start({.max_unsent_bytes = 1'000'000'000, .write_timeout = std::chrono::milliseconds(100)});
  Client client(server_->port());
  client.send("GET /flood HTTP/1.1\r\nHost: x\r\n\r\n");
  until([&] { return num_gone_ == 1; });
}

TEST_F(HttpServerTest, RefusesARequestThatDoesNotCome) {
  start({.idle_timeout = std::chrono::milliseconds(100),
         .read_timeout = std::chrono::milliseconds(100)});
  Client slow(server_->port()), silent(server_->port());
  slow.send("GET /echo HT");
  EXPECT_TRUE(slow.receive().starts_with("HTTP/1.1 408 "));
  EXPECT_EQ(silent.receive(), "");
}

TEST_F(HttpServerTest, ARefusalReachesAClientThatStillSends) {
  start({.limits = {.max_body_bytes = 10}});
  Client client(server_->port());
  client.send(post("/echo", std::string(1'000'000, 'x')));
  const auto answer = client.receive();
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 413 ")) << answer;
  EXPECT_TRUE(answer.ends_with("refused 413: the request's body is longer than the server takes"));
}

// Bodies that have not come whole, of clients that do not go on.
TEST_F(HttpServerTest, RefusesLargeBodiesBeyondWhatAllMayHold) {
  start(
      {.limits = {.max_body_bytes = std::size_t{4} << 20}, .max_held_bytes = std::size_t{4} << 20});
  const std::string head = "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n";
  const std::string part(2'500'000, 'x');
  Client first(server_->port());
  first.send(head + part);
  Client second(server_->port());
  second.send(head + part);
  std::array<pollfd, 2> ends{{{first.fd(), POLLIN, 0}, {second.fd(), POLLIN, 0}}};
  ASSERT_EQ(poll(ends.data(), ends.size(), 20'000), 1);
  auto& refused = ends[0].revents != 0 ? first : second;
  EXPECT_TRUE(refused.receive().starts_with("HTTP/1.1 503 "));
  Client small(server_->port());
  small.send("POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
  EXPECT_TRUE(small.receive().ends_with("\r\n\r\nok"));
}

TEST_F(HttpServerTest, RefusesConnectionsBeyondItsLimit) {
  start({.max_connections = 2});
  Client first(server_->port()), second(server_->port());
  first.send(post("/echo", "x"));
  first.receive("\r\n\r\nx");
  second.send(post("/echo", "x"));
  second.receive("\r\n\r\nx");
  Client third(server_->port());
  EXPECT_TRUE(third.receive().starts_with("HTTP/1.1 503 "));
}

TEST_F(HttpServerTest, AHandlerThatThrowsIsAnError500) {
  start();
  Client client(server_->port());
  client.send("GET /absent HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_TRUE(client.receive("such path").starts_with("HTTP/1.1 500 "));
}

TEST_F(HttpServerTest, StopsWhenAnswersUnderWayHaveEnded) {
  start();
  Client client(server_->port());
  client.send("GET /wait HTTP/1.1\r\nHost: x\r\n\r\n");
  until([&] { return num_waiting_ == 1; });
  server_->stop();
  server_->post([this] { waiting_->respond({.body = "at last"}); });
  EXPECT_TRUE(client.receive().ends_with("at last"));
  thread_.join();
}

TEST_F(HttpServerTest, AnAddressInUseIsAnError) {
  start();
  EXPECT_THROW(HttpServer({.port = server_->port()}, {}, {}), Error);
}

}  // namespace http_server_test
}  // namespace ferry::serve
