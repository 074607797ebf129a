#include <string>
#include <vector>

#include "serve/http/request_parser.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {
namespace {

using serve::HttpRequest;
using serve::RequestParser;

struct Read {
  std::vector<HttpRequest> requests{};
  int refused = 0;
};

Read read(std::string_view bytes, std::size_t step) {
  RequestParser parser({.max_header_bytes = 2000, .max_body_bytes = 3000});
  Read all;
  while (!bytes.empty() && all.refused == 0) {
    const auto taken = parser.feed(bytes.substr(0, step));
    bytes.remove_prefix(taken);
    all.refused = parser.refused_status();
    if (parser.is_complete())
      all.requests.push_back(parser.take());
    else
      expect(taken > 0 || all.refused != 0, "the parser takes nothing");
  }
  return all;
}

}  // namespace

// Bytes in parts are the requests of the whole.
void http_request(std::string_view input) {
  const auto whole = read(input, input.size());
  for (const auto& request : whole.requests) {
    expect(request.body.size() <= 3000, "a body of {} bytes", request.body.size());
    (void)request.query_value("mode");
  }
  const auto parts = read(input, 1);
  expect(parts.refused == whole.refused, "refused by {} in parts, {} in the whole", parts.refused,
         whole.refused);
  expect(parts.requests.size() == whole.requests.size(), "{} requests in parts, {} in the whole",
         parts.requests.size(), whole.requests.size());
  for (std::size_t i = 0; i < whole.requests.size(); ++i)
    expect(parts.requests[i].body == whole.requests[i].body &&
               parts.requests[i].path == whole.requests[i].path &&
               parts.requests[i].headers == whole.requests[i].headers,
           "another request in parts");
}

}  // namespace ferry::fuzz
