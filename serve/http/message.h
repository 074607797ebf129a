// A request and a response of HTTP/1.1 as values.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ferry::serve {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method{};
  std::string path{};     // without the query
  std::string query{};    // behind the '?', as it came
  HttpHeaders headers{};  // names in lower case, values without white space around them
  std::string body{};
  int minor_version = 1;   // of HTTP/1
  bool keep_alive = true;  // the client may send another request

  // Empty if there is no such header.
  std::string_view header(std::string_view lower_case_name) const;
  // True if it is authorized by this API key. Takes the same time wherever a wrong one differs.
  bool has_bearer(std::string_view api_key) const;
  // The value of `name=value` in the query, with %XX and '+' decoded; empty if it is absent.
  std::string query_value(std::string_view name) const;
  // The rest of the path behind a prefix that it has, with %XX decoded.
  std::string path_behind(std::string_view prefix) const;
};

struct HttpResponse {
  int status = 200;
  std::string body{};
  std::string content_type = "application/json";
  HttpHeaders headers{};
};

std::string_view reason_phrase(int status);

std::string lower_case(std::string_view text);  // of ASCII

}  // namespace ferry::serve
