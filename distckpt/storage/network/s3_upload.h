// Objects that are written to S3: in one request, or in parts that become an object when all of
// them are there. The store checks each part: by its CRC-32 if it says that it knows such, else by
// its MD5, which takes twenty times as long.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "distckpt/storage/network/s3_client.h"

namespace ferry::distckpt {

// The run that writes an object: the object says so (x-amz-meta-ferry-run), so that no other run
// removes it.
struct S3Claim {
  std::string run{};      // empty: the object says nothing
  bool only_new = false;  // refuses to replace an object (If-None-Match)
};

// Uploads that were begun and neither completed nor aborted, by key. Empty where the store does not
// say.
using UnfinishedUploads = std::map<std::string, std::vector<std::string>>;
UnfinishedUploads s3_unfinished(const S3Place& below);
// Removes the object, or the upload, for work that has failed. Who has interrupted it does not wait
// for a store that is silent: it is asked once then, for three seconds. False if it did not answer.
bool s3_tidy(const S3Place& place, const S3Query& query = {}) noexcept;
bool s3_abort(const S3Place& place, const std::string& upload) noexcept;
// The same of an object, unless another run has put it.
bool s3_tidy_own(const S3Place& place, const std::string& run) noexcept;

// Throw Error(kIo), and Error(kUsage) for an object that may not be replaced.
void s3_put(const S3Place& place, std::span<const std::byte> bytes, const S3Claim& claim = {});
void s3_delete(const S3Place& place);  // also of what is not there

class S3Upload {
 public:
  explicit S3Upload(S3Place place, S3Claim claim = {});  // begins one
  // Continues one of an earlier run, which the object then names: it keeps its parts.
  S3Upload(S3Place place, std::string unfinished, S3Claim claim = {});

  // Sends the part, unless the store has it with the same bytes. Numbers begin at 1. Thread-safe.
  void put(int number, std::span<const std::byte> bytes);

  // The object appears, of the parts that were put. Throws as s3_put() does.
  void complete(std::int64_t size);
  bool abort() noexcept;  // as s3_abort()

  std::int64_t kept_bytes() const { return kept_bytes_; }  // that were there already

 private:
  struct Part {
    std::string etag{};
    std::int64_t size = 0;
    std::string crc32{};  // in base64, if the store checks by it
  };
  bool is_complete(std::int64_t size) const;

  S3Place place_;
  S3Claim claim_;
  bool continued_ = false;
  std::string id_;
  bool knows_crc32_ = false;  // the store checks the parts of this upload by it
  std::mutex mutex_;
  std::map<int, Part> there_;  // of an earlier run
  std::map<int, Part> put_;
  std::int64_t kept_bytes_ = 0;
};

}  // namespace ferry::distckpt
