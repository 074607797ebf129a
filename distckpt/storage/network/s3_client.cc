#include "distckpt/storage/network/s3_client.h"

#include <charconv>

#include "distckpt/base/error.h"
#include "distckpt/base/printable.h"
#include "distckpt/storage/network/aws_settings.h"
#include "distckpt/storage/network/http_advice.h"

namespace ferry::distckpt {
namespace {

constexpr std::string_view kS3Scheme = "s3://";
constexpr int kMaxPages = 200;
constexpr std::int64_t kMaxListPage = std::int64_t{16} << 20;

void append_utf8(std::string& text, std::uint32_t code) {
  const auto add = [&](std::uint32_t byte) { text += static_cast<char>(byte); };
  const auto follow = [&](int shift) { add(0x80U | ((code >> shift) & 0x3FU)); };
  if (code < 0x80) return add(code);
  if (code < 0x800) {
    add(0xC0U | (code >> 6));
  } else if (code < 0x10000) {
    add(0xE0U | (code >> 12));
    follow(6);
  } else {
    add(0xF0U | (code >> 18));
    follow(12);
    follow(6);
  }
  follow(0);
}

std::string unescape(std::string_view text) {
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto end = text[i] == '&' ? text.find(';', i) : std::string_view::npos;
    if (end == std::string_view::npos) {
      plain += text[i];
      continue;
    }
    const auto name = text.substr(i + 1, end - i - 1);
    std::uint32_t code = 0;
    if (name == "amp")
      plain += '&';
    else if (name == "lt")
      plain += '<';
    else if (name == "gt")
      plain += '>';
    else if (name == "quot")
      plain += '"';
    else if (name == "apos")
      plain += '\'';
    else if (name.starts_with('#')) {
      const bool hex = name.size() > 1 && name[1] == 'x';
      std::from_chars(name.data() + (hex ? 2 : 1), name.data() + name.size(), code, hex ? 16 : 10);
      append_utf8(plain, code);
    }
    i = end;
  }
  return plain;
}

// The address of a bucket, and the path in front of its keys.
std::string s3_base(const std::string& bucket, const AwsSettings& settings) {
  if (!settings.endpoint.empty()) return fmt::format("{}/{}", settings.endpoint, bucket);
  // A certificate of *.s3.amazonaws.com covers no name with a dot.
  if (bucket.find('.') != std::string::npos)
    return fmt::format("https://s3.{}.amazonaws.com/{}", settings.region, bucket);
  return fmt::format("https://{}.s3.{}.amazonaws.com", bucket, settings.region);
}

}  // namespace

S3Place parse_s3_address(std::string_view address) {
  const auto rest = address.substr(kS3Scheme.size());
  const auto slash = rest.find('/');
  S3Place place{.bucket = std::string(rest.substr(0, slash)),
                .key = slash == std::string_view::npos ? "" : std::string(rest.substr(slash + 1))};
  constexpr std::string_view kNameCharacters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.-_";
  const bool good =
      !place.bucket.empty() && place.bucket.find_first_not_of(kNameCharacters) == std::string::npos;
  if (!good) {
    throw Error(ErrorKind::kUsage, fmt::format("{}: names no bucket", printable(address)),
                "write s3://BUCKET/KEY");
  }
  return place;
}

HttpRequest s3_request(std::string method, const S3Place& place, const S3Query& query) {
  const auto settings = aws_settings();
  HttpRequest request{
      .method = std::move(method),
      .url = fmt::format("{}/{}", s3_base(place.bucket, settings), url_encode(place.key, "/"))};
  char separator = '?';
  for (const auto& [name, value] : query) {
    request.url += fmt::format("{}{}={}", separator, url_encode(name), url_encode(value));
    separator = '&';
  }
  if (settings.id.empty()) return request;
  request.aws = {.id = settings.id,
                 .secret = settings.secret,
                 .session_token = settings.session_token,
                 .region = settings.region};
  // The connection protects the bytes, and a checksum those of uploads.
  request.headers.emplace_back("x-amz-content-sha256: UNSIGNED-PAYLOAD");
  return request;
}

HttpResponse s3_send(const HttpRequest& request, const S3Place& place) {
  auto response = http_send(request);
  s3_require_ok(response, request, place);
  return response;
}

void s3_require_ok(const HttpResponse& response, const HttpRequest& request, const S3Place& place) {
  if (response.ok()) return;
  const HttpAttempt attempt{.response = response};
  const auto status = attempt.response.status;
  auto hint = advice(attempt.response);
  if ((status == 401 || status == 403) && !request.aws)
    hint = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE";
  throw Error(status == 404 ? ErrorKind::kNotFound : ErrorKind::kIo,
              fmt::format("{}: {}", place.address(), attempt.describe()), hint);
}

void for_each_element(std::string_view xml,
                      std::string_view name,
                      const std::function<void(std::string_view text)>& visit) {
  const auto open = fmt::format("<{}>", name);
  const auto close = fmt::format("</{}>", name);
  for (auto at = xml.find(open); at != std::string_view::npos; at = xml.find(open, at)) {
    at += open.size();
    const auto end = xml.find(close, at);
    if (end == std::string_view::npos) return;
    visit(xml.substr(at, end - at));
    at = end;
  }
}

std::optional<std::string> element_text(std::string_view xml, std::string_view name) {
  std::optional<std::string> found;
  for_each_element(xml, name, [&](std::string_view text) {
    if (!found) found = unescape(text);
  });
  return found;
}

void s3_list(const S3Place& bucket,
             const std::string& prefix,
             const std::function<void(std::string key, std::int64_t size)>& visit) {
  std::optional<std::string> next;
  for (int page = 0;; ++page) {
    require(page < kMaxPages, ErrorKind::kUsage,
            "s3://{}/{}: more than {} pages of objects begin so: name the checkpoint's own folder",
            bucket.bucket, prefix, kMaxPages);
    S3Query query{{"list-type", "2"}, {"prefix", prefix}};
    if (next) query.emplace("continuation-token", *next);
    auto request = s3_request("GET", {.bucket = bucket.bucket}, query);
    request.max_body = kMaxListPage;
    const auto xml = s3_send(request, bucket).body;
    require(xml.find("<ListBucketResult") != std::string::npos, ErrorKind::kIo,
            "{}: answers with no list of objects", bucket.address());
    for_each_element(xml, "Contents", [&](std::string_view object) {
      const auto key = element_text(object, "Key");
      const auto size = element_text(object, "Size").value_or("");
      std::int64_t bytes = -1;
      std::from_chars(size.data(), size.data() + size.size(), bytes);
      require(key && bytes >= 0, ErrorKind::kIo, "{}: lists an object without key or size",
              bucket.address());
      if (key->starts_with(prefix)) visit(*key, bytes);
    });
    if (element_text(xml, "IsTruncated") != "true") return;
    next = element_text(xml, "NextContinuationToken");
    require(next.has_value(), ErrorKind::kIo, "{}: lists a part, and not how to go on",
            bucket.address());
  }
}

}  // namespace ferry::distckpt
