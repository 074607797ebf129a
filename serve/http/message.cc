#include "serve/http/message.h"

#include <algorithm>

#include "distckpt/base/encodings.h"

namespace ferry::serve {

std::string lower_case(std::string_view text) {
  std::string lower(text);
  for (auto& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return lower;
}

std::string_view HttpRequest::header(std::string_view lower_case_name) const {
  const auto found =
      std::ranges::find(headers, lower_case_name, &std::pair<std::string, std::string>::first);
  return found == headers.end() ? std::string_view() : std::string_view(found->second);
}

bool HttpRequest::has_bearer(std::string_view api_key) const {
  constexpr std::string_view kBearer = "bearer ";
  auto given = header("authorization");
  if (lower_case(given.substr(0, kBearer.size())) != kBearer) return false;
  given.remove_prefix(std::min(given.find_first_not_of(' ', kBearer.size()), given.size()));
  unsigned difference = given.size() == api_key.size() ? 0 : 1;
  for (std::size_t i = 0; i < api_key.size(); ++i) {
    const char c = given.empty() ? '\0' : given[i % given.size()];
    difference |= static_cast<unsigned char>(c) ^ static_cast<unsigned char>(api_key[i]);
  }
  return difference == 0;
}

std::string HttpRequest::query_value(std::string_view name) const {
  std::string_view rest = query;
  while (!rest.empty()) {
    const auto pair = rest.substr(0, rest.find('&'));
    rest.remove_prefix(std::min(rest.size(), pair.size() + 1));
    const auto equals = std::min(pair.find('='), pair.size());
    if (percent_decoded(pair.substr(0, equals), true) == name)
      return percent_decoded(pair.substr(std::min(pair.size(), equals + 1)), true);
  }
  return "";
}

std::string HttpRequest::path_behind(std::string_view prefix) const {
  return percent_decoded(std::string_view(path).substr(prefix.size()), false);
}

std::string_view reason_phrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 401:
      return "Unauthorized";
    case 403:
      return "Forbidden";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 408:
      return "Request Timeout";
    case 409:
      return "Conflict";
    case 415:
      return "Unsupported Media Type";
    case 413:
      return "Content Too Large";
    case 429:
      return "Too Many Requests";
    case 431:
      return "Request Header Fields Too Large";
    case 500:
      return "Internal Server Error";
    case 501:
      return "Not Implemented";
    case 503:
      return "Service Unavailable";
    case 504:
      return "Gateway Timeout";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "Unknown";
  }
}

}  // namespace ferry::serve
