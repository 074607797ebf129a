#include <algorithm>
#include <charconv>
#include <cstring>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/printable.h"
#include "distckpt/storage/network/http_advice.h"
#include "distckpt/storage/remote_tree.h"

namespace ferry::distckpt {
namespace {

constexpr std::int64_t kBlock = std::int64_t{128} << 10;
constexpr std::int64_t kShort = std::int64_t{64} << 10;  // reads of less come in blocks
constexpr std::size_t kMaxBlocks = 4;                    // that an object keeps

std::string version_of(const HttpResponse& response) {
  auto tag = response.header("etag");
  return tag.empty() ? response.header("last-modified") : tag;
}

std::string range_header(std::int64_t offset, std::int64_t length) {
  return fmt::format("Range: bytes={}-{}", offset, offset + length - 1);
}

// "bytes 0-99/200".
struct ContentRange {
  std::int64_t first = -1;
  std::int64_t last = -1;
  std::int64_t total = -1;
};
std::optional<ContentRange> parse_content_range(std::string_view text) {
  constexpr std::string_view kUnit = "bytes ";
  if (!text.starts_with(kUnit)) return std::nullopt;
  const auto* at = text.data() + kUnit.size();
  const auto* end = text.data() + text.size();
  ContentRange range;
  const auto take = [&](std::int64_t& into, char after) {
    const auto [stop, error] = std::from_chars(at, end, into);
    const bool good =
        error == std::errc() && (after == '\0' ? stop == end : stop < end && *stop == after);
    at = stop < end ? stop + 1 : end;
    return good;
  };
  if (!take(range.first, '-') || !take(range.last, '/') || !take(range.total, '\0'))
    return std::nullopt;
  return range;
}

}  // namespace

RemoteObject::RemoteObject(std::string address, RemoteStore& store)
    : address_(std::move(address)), store_(store) {}

std::shared_ptr<const RemoteObject> RemoteObject::open(std::string address, RemoteStore& store) {
  std::shared_ptr<RemoteObject> object(new RemoteObject(std::move(address), store));
  return object->open() ? object : nullptr;
}

HttpRequest RemoteObject::next_request() const {
  auto request = store_.request(address_);
  const std::lock_guard lock(mutex_);
  if (direct_url_.empty()) return request;
  if (origin_of(direct_url_) != origin_of(request.url)) return {.url = direct_url_};
  request.url = direct_url_;
  return request;
}

void RemoteObject::note(const HttpResponse& response) const {
  const bool redirected = response.url != store_.request(address_).url;
  const std::lock_guard lock(mutex_);
  if (redirected) direct_url_ = response.url;
}

// The first block says what the object is.
bool RemoteObject::open() {
  auto request = store_.request(address_);
  request.headers.push_back(range_header(0, kBlock));
  request.max_body = kBlock;
  bool ranged = false;
  request.accept = [&](const HttpResponse& response) {
    const auto range = parse_content_range(response.header("content-range"));
    ranged = response.status == 206;
    const auto length = response.number("content-length");
    if (!ranged && length && *length > kBlock) {
      throw Error(
          ErrorKind::kIo,
          fmt::format("{}: the server answers no ranges of bytes: it would send all {} bytes",
                      address_, *length),
          "python3 -m http.server is such a server; nginx and Caddy answer ranges");
    }
    if (!ranged) return;
    require(range && range->first == 0 && range->total > range->last &&
                range->last == std::min(kBlock, range->total) - 1,
            ErrorKind::kIo, "{}: asked for bytes 0 to {}, the server answers {}", address_, kBlock,
            printable(response.header("content-range")));
    size_ = range->total;
  };
  auto response = http_send(request);
  if (response.status == 404 || response.status == 410) return false;
  const bool empty = response.status == 416;  // no byte can be asked of a file that has none
  if (!response.ok() && !empty) {
    auto hint = advice(response);
    if (hint.empty() && (response.status == 401 || response.status == 403))
      hint = "it needs credentials (HF_TOKEN, AWS_ACCESS_KEY_ID), or others";
    throw Error(ErrorKind::kIo,
                fmt::format("{}: {}", address_, HttpAttempt{.response = response}.describe()),
                hint);
  }
  if (empty) response.body.clear();
  if (!ranged) size_ = static_cast<std::int64_t>(response.body.size());
  const auto expected = std::min(kBlock, size_);
  require(static_cast<std::int64_t>(response.body.size()) == expected, ErrorKind::kIo,
          "{}: {} bytes were expected, the server sends {}", address_, expected,
          response.body.size());
  version_ = version_of(response);
  require(
      !version_.empty() || empty, ErrorKind::kIo,
      "{}: the server says neither ETag nor Last-Modified, so that a change of it would not show",
      address_);
  blocks_[0] = std::make_shared<const std::string>(std::move(response.body));
  note(response);
  return true;
}

void RemoteObject::accept(const HttpResponse& response,
                          std::int64_t offset,
                          std::int64_t length) const {
  if (const auto now = version_of(response); now != version_) {
    throw Error(
        ErrorKind::kIo,
        fmt::format("{}: was changed by someone else while it was read: it was {}, and is {}",
                    address_, printable(version_), printable(now)),
        "let nobody write to the source, and run the same command again");
  }
  if (response.status == 200 && offset == 0 && length == size_) return;
  require(response.status == 206, ErrorKind::kIo,
          "{}: the server answers no ranges of bytes (status {})", address_, response.status);
  const auto range = parse_content_range(response.header("content-range"));
  require(range && range->first == offset && range->last == offset + length - 1 &&
              range->total == size_,
          ErrorKind::kIo, "{}: asked for bytes {} to {} of {}, the server answers {}", address_,
          offset, offset + length, size_, printable(response.header("content-range")));
  const auto stated = response.number("content-length");
  require(!stated || *stated == length, ErrorKind::kIo,
          "{}: asked for {} bytes, the server announces {}", address_, length, stated.value_or(0));
}

void RemoteObject::fetch(std::int64_t offset, std::span<std::byte> into) const {
  Backoff backoff;
  std::size_t done = 0;
  while (done < into.size()) {
    const auto from = offset + static_cast<std::int64_t>(done);
    const auto rest = into.subspan(done);
    const auto length = static_cast<std::int64_t>(rest.size());
    auto request = next_request();
    const auto asked = request.url;
    request.headers.push_back(range_header(from, length));
    request.into = rest;
    request.accept = [&](const HttpResponse& response) { accept(response, from, length); };
    auto attempt = http_try(request);
    done += static_cast<std::size_t>(attempt.received);
    if (attempt.received > 0) backoff.progressed();
    if (done == into.size()) {
      note(attempt.response);
      return;
    }
    const auto status = attempt.response.status;
    require(status != 416 && status != 404 && status != 410 && status != 412, ErrorKind::kIo,
            "{}: was changed by someone else while it was read: the server answers {}", address_,
            status);
    {
      // Addresses that redirects lead to are signed for an hour or so.
      const std::lock_guard lock(mutex_);
      if (asked == direct_url_ && attempt.failure.empty() && status >= 400 && status < 500) {
        direct_url_.clear();
        continue;
      }
    }
    if (attempt.failure.empty() && attempt.response.ok()) {
      attempt.failure = fmt::format("only {} of {} bytes came", attempt.received, length);
      attempt.again = true;
    }
    backoff.after(attempt, address_);
  }
}

std::shared_ptr<const std::string> RemoteObject::block(std::int64_t index) const {
  {
    const std::lock_guard lock(mutex_);
    const auto known = blocks_.find(index);
    if (known != blocks_.end()) return known->second;
  }
  const auto length = std::min(kBlock, size_ - index * kBlock);
  std::string bytes(static_cast<std::size_t>(length), '\0');
  fetch(index * kBlock, std::as_writable_bytes(std::span(bytes)));
  auto fetched = std::make_shared<const std::string>(std::move(bytes));
  const std::lock_guard lock(mutex_);
  if (blocks_.size() >= kMaxBlocks) blocks_.erase(blocks_.begin());
  blocks_[index] = fetched;
  return fetched;
}

void RemoteObject::read_at(std::int64_t offset, std::span<std::byte> into) const {
  if (into.empty()) return;
  const auto length = static_cast<std::int64_t>(into.size());
  const auto first = offset / kBlock;
  const auto last = (offset + length - 1) / kBlock;
  const bool known = [&] {
    const std::lock_guard lock(mutex_);
    return last == first && blocks_.contains(first);
  }();
  if (length >= kShort && !known) return fetch(offset, into);
  std::size_t done = 0;
  for (auto index = first; index <= last; ++index) {
    const auto bytes = block(index);
    const auto from = static_cast<std::size_t>(std::max(offset - index * kBlock, std::int64_t{0}));
    const auto count = std::min(bytes->size() - from, into.size() - done);
    std::memcpy(into.data() + done, bytes->data() + from, count);
    done += count;
  }
}

}  // namespace ferry::distckpt
