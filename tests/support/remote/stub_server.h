// An HTTP server on 127.0.0.1 whose answers a test writes to the byte.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace ferry::support {

struct StubRequest {
  std::string method{};
  std::string target{};                          // path and query, as they came
  std::map<std::string, std::string> headers{};  // names in lower case
  std::string body{};

  std::string header(const std::string& name) const;  // empty: it has none
};

// An answer with its Content-Length, behind which the connection ends. `headers`: "Name: value".
std::string stub_answer(int status,
                        std::string_view body = "",
                        const std::vector<std::string>& headers = {});

// One request a connection, one connection after the other.
class StubServer {
 public:
  // The bytes that are sent before the connection is closed, to HEAD without those of the body.
  // None: the connection breaks off.
  using Answer = std::function<std::string(const StubRequest&)>;

  explicit StubServer(Answer answer);
  ~StubServer();
  StubServer(const StubServer&) = delete;
  StubServer& operator=(const StubServer&) = delete;

  std::string url() const;  // "http://127.0.0.1:PORT"
  std::vector<StubRequest> requests() const;

 private:
  void serve();
  void converse(int connection);

  Answer answer_;
  int listener_ = -1;
  int stop_ = -1;
  int port_ = 0;
  mutable std::mutex mutex_;
  std::vector<StubRequest> requests_;
  std::thread thread_;
};

}  // namespace ferry::support
