#include "distckpt/storage/network/s3_upload.h"

#include <array>
#include <charconv>
#include <chrono>
#include <optional>
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

std::string etag_of(const HttpResponse& response, const S3Place& place) {
  auto etag = response.header("etag");
  require(!etag.empty(), ErrorKind::kIo, "{}: the store took it, and gives no ETag",
          place.address());
  return etag;
}

// A request whose bytes the store checks by a header. The ETag of its answer.
std::string send_checked(HttpRequest request,
                         const S3Place& place,
                         std::span<const std::byte> bytes,
                         std::string check) {
  request.headers.push_back(std::move(check));
  request.body = bytes;
  return etag_of(s3_send(request, place), place);
}

constexpr std::string_view kRunHeader = "x-amz-meta-ferry-run";

void say_run(HttpRequest& request, const S3Claim& claim) {
  if (!claim.run.empty()) request.headers.push_back(fmt::format("{}: {}", kRunHeader, claim.run));
}

bool is_of(const S3Place& place, const std::string& run) {
  const auto response = http_send(s3_request("HEAD", place));
  return response.ok() && response.header(kRunHeader) == run;
}

// Sends what makes an object appear. Stores that know no conditions (501) are asked without.
HttpResponse send_claimed(HttpRequest request, const S3Claim& claim) {
  if (!claim.only_new) return http_send(request);
  request.headers.emplace_back("If-None-Match: *");
  auto response = http_send(request);
  if (response.status != 501) return response;
  request.headers.pop_back();
  return http_send(request);
}

// Answers to a condition: there is an object, or one is just being put.
bool says_taken(const HttpResponse& response, const S3Claim& claim) {
  return claim.only_new && (response.status == 412 || response.status == 409);
}

[[noreturn]] void refuse_taken(const S3Place& place) {
  throw Error(ErrorKind::kUsage,
              fmt::format("{}: another run has put it meanwhile", place.address()),
              "wait for that run to end; then choose another target, or replace it with "
              "--overwrite");
}

// Sends it for work that has failed: once and for three seconds if that was interrupted. Nothing:
// no answer.
std::optional<HttpResponse> ask_tidily(HttpRequest request) {
  const bool hurries = is_interrupted();
  const InterruptedBy nothing({});
  if (!hurries) return http_send(request);
  request.timeout = std::chrono::seconds(3);
  auto attempt = http_try(request);
  if (!attempt.failure.empty()) return std::nullopt;
  return std::move(attempt.response);
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
    return ask_tidily(s3_request("DELETE", place, query)).has_value();
  } catch (...) {
    // The error that led here is the one to tell. The store's own rules clear what is left.
    return false;
  }
}

bool s3_tidy_own(const S3Place& place, const std::string& run) noexcept {
  try {
    const auto there = ask_tidily(s3_request("HEAD", place));
    if (!there) return false;
    return !there->ok() || there->header(kRunHeader) != run || s3_tidy(place);
  } catch (...) {
    return false;  // as s3_tidy()
  }
}

bool s3_abort(const S3Place& place, const std::string& upload) noexcept {
  return s3_tidy(place, {{"uploadId", upload}});
}

void s3_put(const S3Place& place, std::span<const std::byte> bytes, const S3Claim& claim) {
  auto request = s3_request("PUT", place);
  say_run(request, claim);
  request.headers.push_back(md5_header(bytes));
  request.body = bytes;
  const auto response = send_claimed(request, claim);
  if (response.ok()) return void(etag_of(response, place));
  if (!says_taken(response, claim)) s3_require_ok(response, request, place);
  // An answer that was lost leads to a second request.
  if (claim.run.empty() || !is_of(place, claim.run)) refuse_taken(place);
}

void s3_delete(const S3Place& place) {
  s3_send(s3_request("DELETE", place), place);
}

S3Upload::S3Upload(S3Place place, S3Claim claim)
    : place_(std::move(place)), claim_(std::move(claim)) {
  auto request = s3_request("POST", place_, {{"uploads", ""}});
  say_run(request, claim_);
  request.headers.emplace_back("x-amz-checksum-algorithm: CRC32");
  const auto response = s3_send(request, place_);
  knows_crc32_ = response.header("x-amz-checksum-algorithm") == "CRC32";
  auto id = element_text(response.body, "UploadId");
  require(id && !id->empty(), ErrorKind::kIo, "{}: the store begins no upload", place_.address());
  id_ = std::move(*id);
}

S3Upload::S3Upload(S3Place place, std::string unfinished, S3Claim claim)
    : place_(std::move(place)),
      claim_(std::move(claim)),
      continued_(true),
      id_(std::move(unfinished)) {
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
  const auto response = send_claimed(request, claim_);
  // It answers 200 before it knows, and an answer that was lost leads to a second request.
  const bool good = response.ok() && response.body.find("<Error>") == std::string::npos;
  if (good || is_complete(size)) return;
  if (says_taken(response, claim_)) refuse_taken(place_);
  fail(ErrorKind::kIo, "{}: the store does not put the parts together: {}", place_.address(),
       HttpAttempt{.response = response}.describe());
}

bool S3Upload::is_complete(std::int64_t size) const {
  const auto response = http_send(s3_request("HEAD", place_));
  const auto parts = fmt::format("-{}\"", put_.size());
  const bool ours = continued_ || claim_.run.empty() || response.header(kRunHeader) == claim_.run;
  return response.ok() && ours && response.number("content-length") == size &&
         response.header("etag").ends_with(parts);
}

bool S3Upload::abort() noexcept {
  return s3_abort(place_, id_);
}

}  // namespace ferry::distckpt
