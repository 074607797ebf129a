#include "serve/http/request_parser.h"

#include <algorithm>
#include <charconv>
#include <utility>

#include "distckpt/base/trimmed.h"

namespace ferry::serve {
namespace {

constexpr std::string_view kBlanks = " \t";

constexpr std::size_t kLongestChunkLine = 256;
constexpr std::size_t kFirstBodyBytes = std::size_t{1} << 20;  // reserved before any have come

bool is_token_char(char c) {
  constexpr std::string_view kOthers = "!#$%&'*+-.^_`|~";
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') ||
         kOthers.find(c) != std::string_view::npos;
}

bool is_token(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, is_token_char);
}

// True if a list of words, such as "keep-alive, Upgrade", has this one.
bool lists(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const auto one = list.substr(0, list.find(','));
    if (lower_case(trimmed(one, kBlanks)) == word) return true;
    list.remove_prefix(std::min(list.size(), one.size() + 1));
  }
  return false;
}

// Path and query; of http://HOST/PATH, as one asks a proxy, without scheme and host.
std::string origin_form(std::string_view target) {
  for (const std::string_view scheme : {"http://", "https://"}) {
    if (lower_case(target.substr(0, scheme.size())) != scheme) continue;
    target.remove_prefix(scheme.size());
    const auto end = std::min(target.find_first_of("/?"), target.size());
    if (end == 0) return "";  // there is no host
    target.remove_prefix(end);
    return (target.starts_with('/') ? "" : "/") + std::string(target);
  }
  return std::string(target);
}

bool parse_size(std::string_view digits, int base, std::size_t& value) {
  const auto* const end = digits.data() + digits.size();
  const auto [at, error] = std::from_chars(digits.data(), end, value, base);
  return !digits.empty() && digits.front() != '-' && at == end && error == std::errc();
}

}  // namespace

void RequestParser::refuse(int status, std::string why) {
  refused_status_ = status;
  refusal_ = std::move(why);
}

bool RequestParser::take_expects_continue() {
  return std::exchange(expects_continue_, false);
}

HttpRequest RequestParser::take() {
  auto request = std::move(request_);
  *this = RequestParser(limits_);
  return request;
}

// Appends bytes to the line, up to its end. Returns true if the line is there, without its end.
bool RequestParser::take_line(std::string_view& bytes, std::size_t& taken) {
  const auto newline = bytes.find('\n');
  const auto count = newline == std::string_view::npos ? bytes.size() : newline + 1;
  line_.append(bytes.substr(0, count));
  bytes.remove_prefix(count);
  taken += count;
  if (part_ == Part::kHead || part_ == Part::kTrailer) head_bytes_ += count;
  if (head_bytes_ > limits_.max_header_bytes) {
    refuse(431, "the request's headers are longer than the server takes");
    return false;
  }
  if (part_ == Part::kChunkSize && line_.size() > kLongestChunkLine) {
    refuse(400, "the size of a chunk is too long a line");
    return false;
  }
  if (newline == std::string_view::npos) return false;
  if (!line_.ends_with("\r\n")) {
    refuse(400, "a line of the request does not end with CR LF");
    return false;
  }
  line_.resize(line_.size() - 2);
  return true;
}

std::size_t RequestParser::feed(std::string_view bytes) {
  std::size_t taken = 0;
  while (refused_status_ == 0 && part_ != Part::kComplete && !bytes.empty()) {
    if (part_ == Part::kBody || part_ == Part::kChunk) {
      const auto part = bytes.substr(0, left_);
      request_.body.append(part);
      bytes.remove_prefix(part.size());
      taken += part.size();
      left_ -= part.size();
      if (left_ == 0) part_ = part_ == Part::kBody ? Part::kComplete : Part::kChunkEnd;
    } else if (take_line(bytes, taken)) {
      end_line();
      line_.clear();
    }
  }
  return taken;
}

void RequestParser::end_line() {
  switch (part_) {
    case Part::kHead:
      if (!has_request_line_) {
        if (!line_.empty()) read_request_line(line_);  // else an empty line before the request
      } else if (line_.empty()) {
        end_head();
      } else {
        read_header(line_);
      }
      return;
    case Part::kChunkSize:
      return read_chunk_size(line_);
    case Part::kChunkEnd:
      if (!line_.empty()) return refuse(400, "a chunk is longer than its size");
      part_ = Part::kChunkSize;
      return;
    case Part::kTrailer:
      if (line_.empty()) part_ = Part::kComplete;
      return;
    default:
      return;
  }
}

void RequestParser::read_request_line(std::string_view line) {
  const auto first = line.find(' ');
  const auto last = line.rfind(' ');
  if (first == std::string_view::npos || first == last || !is_token(line.substr(0, first)))
    return refuse(400, "the request line is not METHOD TARGET HTTP/1.1");
  request_.method = line.substr(0, first);
  const auto target = origin_form(line.substr(first + 1, last - first - 1));
  const auto version = line.substr(last + 1);
  const bool is_of_server = target == "*" && request_.method == "OPTIONS";
  if (!(target.starts_with('/') || is_of_server) ||
      std::ranges::any_of(target, [](char c) { return c <= ' ' || c > '~'; }))
    return refuse(400, "the target of the request is not a path in ASCII");
  if (version != "HTTP/1.1" && version != "HTTP/1.0")
    return refuse(version.starts_with("HTTP/") ? 505 : 400, "the request is not of HTTP/1.1");
  request_.minor_version = version.back() - '0';
  const auto question = std::min(target.find('?'), target.size());
  request_.path = target.substr(0, question);
  request_.query = target.substr(std::min(target.size(), question + 1));
  has_request_line_ = true;
}

void RequestParser::read_header(std::string_view line) {
  const auto colon = line.find(':');
  if (colon == std::string_view::npos || !is_token(line.substr(0, colon)))
    return refuse(400, "a header is not NAME: VALUE");
  const auto value = trimmed(line.substr(colon + 1), kBlanks);
  if (std::ranges::any_of(value, [](char c) {
        return (static_cast<unsigned char>(c) < ' ' && c != '\t') || c == '\x7f';
      }))
    return refuse(400, "a header has a control character");
  request_.headers.emplace_back(lower_case(line.substr(0, colon)), value);
}

// Finds out how long the body is, and whether the connection goes on behind it.
void RequestParser::end_head() {
  std::size_t num_lengths = 0, num_codings = 0, num_hosts = 0, length = 0;
  for (const auto& [name, value] : request_.headers) {
    if (name == "content-length") {
      ++num_lengths;
      if (!parse_size(value, 10, length)) return refuse(400, "Content-Length is no number");
    } else if (name == "transfer-encoding") {
      ++num_codings;
      if (lower_case(value) != "chunked")
        return refuse(501, "the only Transfer-Encoding known is chunked");
    } else if (name == "host") {
      ++num_hosts;
    }
  }
  if (num_lengths + num_codings > 1 || num_hosts > 1)
    return refuse(400,
                  "Content-Length, Transfer-Encoding and Host may stand once, and the first "
                  "two not together");
  if (num_codings > 0 && request_.minor_version == 0)  // RFC 9112, 6.1
    return refuse(400, "HTTP/1.0 has no Transfer-Encoding");
  if (num_hosts == 0 && request_.minor_version == 1) return refuse(400, "there is no Host");
  if (length > limits_.max_body_bytes)
    return refuse(413, "the request's body is longer than the server takes");
  const auto connection = request_.header("connection");
  request_.keep_alive =
      request_.minor_version == 1 ? !lists(connection, "close") : lists(connection, "keep-alive");
  const bool has_body = num_codings > 0 || length > 0;
  expects_continue_ = has_body && lower_case(request_.header("expect")) == "100-continue";
  has_head_ = true;
  left_ = length;
  request_.body.reserve(std::min(length, kFirstBodyBytes));
  part_ = num_codings > 0 ? Part::kChunkSize : length > 0 ? Part::kBody : Part::kComplete;
}

void RequestParser::read_chunk_size(std::string_view line) {
  const auto digits = trimmed(line.substr(0, line.find(';')), kBlanks);
  std::size_t size = 0;
  if (!parse_size(digits, 16, size)) return refuse(400, "the size of a chunk is no number");
  if (size > limits_.max_body_bytes - request_.body.size())
    return refuse(413, "the request's body is longer than the server takes");
  left_ = size;
  part_ = size > 0 ? Part::kChunk : Part::kTrailer;
}

}  // namespace ferry::serve
