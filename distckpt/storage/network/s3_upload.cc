#include "distckpt/storage/network/s3_upload.h"

#include <array>
#include <charconv>
#include <chrono>
#include <utility>

#include "distckpt/base/encodings.h"
#include "distckpt/base/error.h"
#include "distckpt/base/interruption.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/storage/network/md5.h"

namespace ferry::distckpt {
namespace {

constexpr std::int64_t kMaxXml = std::int64_t{16} << 20;

std::int64_t to_number(const std::optional<std::string>& text) {
  std::int64_t value = -1;
  if (text) std::from_chars(text->data(), text->data() + text->size(), value);
  return value;
}

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// The CRC-32 as S3 has it: the first byte is the highest.
std::string crc32_text(std::span<const std::byte> bytes) {
  const auto crc = crc32(bytes);
  std::array<std::uint8_t, 4> digest{};
  for (unsigned i = 0; i < 4; ++i) digest.at(i) = static_cast<std::uint8_t>(crc >> (24 - 8 * i));
  return base64_text(std::as_bytes(std::span(digest)));
}

// A request whose bytes the store checks by a header. The ETag of its answer.
std::string send_checked(HttpRequest request,
                         const S3Place& place,
                         std::span<const std::byte> bytes,
                         std::string check) {
  request.headers.push_back(std::move(check));
  request.body = bytes;
  const auto etag = s3_send(request, place).header("etag");
  require(!etag.empty(), ErrorKind::kIo, "{}: the store took it, and gives no ETag",
          place.address());
  return etag;
}

std::string md5_header(std::span<const std::byte> bytes) {
  return "Content-MD5: " + base64_text(std::as_bytes(std::span<const std::uint8_t>(md5(bytes))));
}

}  // namespace

UnfinishedUploads s3_unfinished(const S3Place& below) {
  auto request =
      s3_request("GET", {.bucket = below.bucket}, {{"prefix", below.key}, {"uploads", ""}});
  request.max_body = kMaxXml;
  const auto response = http_send(request);
  UnfinishedUploads found;
  if (!response.ok()) return found;  // not everyone who may write may list
  for_each_element(response.body, "Upload", [&](std::string_view upload) {
    const auto key = element_text(upload, "Key");
    const auto id = element_text(upload, "UploadId");
    if (key && id) found[*key].push_back(*id);
  });
  return found;
}

bool s3_tidy(const S3Place& place, const S3Query& query) noexcept {
  try {
    const bool hurries = is_interrupted();
    const InterruptedBy nothing({});
    auto request = s3_request("DELETE", place, query);
    if (!hurries) {
      http_send(request);
      return true;
    }
    request.timeout = std::chrono::seconds(3);
    return http_try(request).failure.empty();
  } catch (...) {
    // The error that led here is the one to tell. The store's own rules clear what is left.
    return false;
  }
}

bool s3_abort(const S3Place& place, const std::string& upload) noexcept {
  return s3_tidy(place, {{"uploadId", upload}});
}

void s3_put(const S3Place& place, std::span<const std::byte> bytes) {
  send_checked(s3_request("PUT", place), place, bytes, md5_header(bytes));
}

void s3_delete(const S3Place& place) {
  s3_send(s3_request("DELETE", place), place);
}

S3Upload::S3Upload(S3Place place) : place_(std::move(place)) {
  auto request = s3_request("POST", place_, {{"uploads", ""}});
  request.headers.emplace_back("x-amz-checksum-algorithm: CRC32");
  const auto response = s3_send(request, place_);
  knows_crc32_ = response.header("x-amz-checksum-algorithm") == "CRC32";
  auto id = element_text(response.body, "UploadId");
  require(id && !id->empty(), ErrorKind::kIo, "{}: the store begins no upload", place_.address());
  id_ = std::move(*id);
}

S3Upload::S3Upload(S3Place place, std::string unfinished)
    : place_(std::move(place)), id_(std::move(unfinished)) {
  std::string marker = "0";
  while (true) {
    auto request = s3_request("GET", place_, {{"part-number-marker", marker}, {"uploadId", id_}});
    request.max_body = kMaxXml;
    const auto xml = s3_send(request, place_).body;
    knows_crc32_ = element_text(xml, "ChecksumAlgorithm") == "CRC32";
    for_each_element(xml, "Part", [&](std::string_view part) {
      const auto number = to_number(element_text(part, "PartNumber"));
      auto etag = element_text(part, "ETag");
      if (number > 0 && etag)
        there_[static_cast<int>(number)] = {.etag = std::move(*etag),
                                            .size = to_number(element_text(part, "Size"))};
    });
    const auto next = element_text(xml, "NextPartNumberMarker");
    if (element_text(xml, "IsTruncated") != "true" || !next || *next == marker) return;
    marker = *next;
  }
}

void S3Upload::put(int number, std::span<const std::byte> bytes) {
  const auto size = static_cast<std::int64_t>(bytes.size());
  const auto crc32 = knows_crc32_ ? crc32_text(bytes) : "";
  const auto there = there_.find(number);
  if (there != there_.end() && there->second.size == size &&
      there->second.etag.find(hex_text(md5(bytes))) != std::string::npos) {
    const std::lock_guard lock(mutex_);
    put_[number] = {.etag = there->second.etag, .size = size, .crc32 = crc32};
    kept_bytes_ += size;
    return;
  }
  const auto request =
      s3_request("PUT", place_, {{"partNumber", std::to_string(number)}, {"uploadId", id_}});
  auto etag = send_checked(request, place_, bytes,
                           knows_crc32_ ? "x-amz-checksum-crc32: " + crc32 : md5_header(bytes));
  const std::lock_guard lock(mutex_);
  put_[number] = {.etag = std::move(etag), .size = size, .crc32 = crc32};
}

void S3Upload::complete(std::int64_t size) {
  std::string xml = "<CompleteMultipartUpload>";
  std::int64_t bytes = 0;
  for (const auto& [number, part] : put_) {
    xml += fmt::format("<Part><PartNumber>{}</PartNumber><ETag>{}</ETag>", number, part.etag);
    if (knows_crc32_) xml += fmt::format("<ChecksumCRC32>{}</ChecksumCRC32>", part.crc32);
    xml += "</Part>";
    bytes += part.size;
  }
  xml += "</CompleteMultipartUpload>";
  require(bytes == size, ErrorKind::kBug, "{}: {} of {} bytes were put", place_.address(), bytes,
          size);
  auto request = s3_request("POST", place_, {{"uploadId", id_}});
  request.body = bytes_of(xml);
  request.max_body = kMaxXml;
  const auto response = http_send(request);
  // It answers 200 before it knows, and an answer that was lost leads to a second request.
  const bool good = response.ok() && response.body.find("<Error>") == std::string::npos;
  if (good || is_complete(size)) return;
  fail(ErrorKind::kIo, "{}: the store does not put the parts together: {}", place_.address(),
       HttpAttempt{.response = response}.describe());
}

bool S3Upload::is_complete(std::int64_t size) const {
  const auto response = http_send(s3_request("HEAD", place_));
  const auto parts = fmt::format("-{}\"", put_.size());
  return response.ok() && response.number("content-length") == size &&
         response.header("etag").ends_with(parts);
}

bool S3Upload::abort() noexcept {
  return s3_abort(place_, id_);
}

}  // namespace ferry::distckpt
