// Reads requests of HTTP/1.1 (RFC 9112) out of bytes as they come, in parts of any size. Strict: a
// request that two readers could understand differently is refused.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "serve/http/message.h"

namespace ferry::serve {

struct ParserLimits {
  std::size_t max_header_bytes = std::size_t{64} << 10;  // request line and headers
  std::size_t max_body_bytes = std::size_t{32} << 20;
};

class RequestParser {
 public:
  explicit RequestParser(ParserLimits limits) : limits_(limits) {}

  // Takes bytes, at most up to the end of a request. Returns how many it took; none once a request
  // is complete or refused.
  std::size_t feed(std::string_view bytes);

  bool has_begun() const { return !line_.empty() || part_ != Part::kHead || head_bytes_ > 0; }
  bool is_complete() const { return part_ == Part::kComplete; }
  // The reason of a refusal: a status, and what is wrong. 0: the request is not refused.
  int refused_status() const { return refused_status_; }
  const std::string& refusal() const { return refusal_; }
  // True once for each request, when its head is there: request() is all of it but for the body.
  bool take_head() { return std::exchange(has_head_, false); }
  const HttpRequest& request() const { return request_; }
  // The client waits for "100 Continue" before it sends the body. True once for each request.
  bool take_expects_continue();

  // The complete request. The next one begins.
  HttpRequest take();

 private:
  enum class Part : std::uint8_t {
    kHead,
    kBody,
    kChunkSize,
    kChunk,
    kChunkEnd,
    kTrailer,
    kComplete
  };

  void refuse(int status, std::string why);
  bool take_line(std::string_view& bytes, std::size_t& taken);
  void end_line();
  void read_request_line(std::string_view line);
  void read_header(std::string_view line);
  void read_chunk_size(std::string_view line);
  void end_head();

  ParserLimits limits_;
  Part part_ = Part::kHead;
  std::string line_{};  // what came of the current line
  std::size_t head_bytes_ = 0;
  std::size_t left_ = 0;  // bytes of the body or the chunk
  bool has_request_line_ = false;
  bool has_head_ = false;
  bool expects_continue_ = false;
  int refused_status_ = 0;
  std::string refusal_{};
  HttpRequest request_{};
};

}  // namespace ferry::serve
