// Files that leave this machine while they are written: a part of one whose bytes are all there is
// sent to S3, and its place in the local file becomes a hole. So the local files hold what is not
// yet a whole part, and nothing else.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "distckpt/execute/file_box_io.h"
#include "distckpt/plan/box_io.h"
#include "distckpt/storage/network/s3_upload.h"

namespace ferry::distckpt {

struct UploadedFile {
  std::filesystem::path local{};
  std::int64_t size = 0;
  S3Place place{};
  S3Claim claim{};
};

// Sends a file that is whole, its parts side by side. Throws as s3_put() does: then no object
// appeared, and the store keeps no part.
void send_file(const UploadedFile& file);

class UploadSink : public BoxSink {
 public:
  // `sink` writes the local files, of which `files` says by storage where they go. With `resume`
  // parts that an interrupted run has sent stay, and an error leaves what was sent to the next
  // run; without it both are removed. `finish` is called with the index of each of the sink's
  // checksum ranges once all of it was written, and may write more.
  UploadSink(FileSink& sink,
             std::vector<UploadedFile> files,
             bool resume,
             std::function<void(std::uint32_t)> finish);
  ~UploadSink() override;
  UploadSink(const UploadSink&) = delete;
  UploadSink& operator=(const UploadSink&) = delete;

  void write(const Region& region,
             std::span<const std::byte> packed,
             std::vector<ChecksumPart>& parts) override;

  // Sends the parts that are complete: whoever writes waits for them.
  void commit(std::span<const ChecksumPart> parts) override;

  // Sends all that is left; then the objects appear, and unfinished uploads of other runs end.
  void complete();

  std::int64_t kept_bytes() const;  // that an earlier run has sent

 private:
  struct File {
    UploadedFile what{};
    std::int64_t part_bytes = 0;
    std::unique_ptr<S3Upload> upload{};
    std::vector<std::string> others{};  // uploads, of other runs
    std::unique_ptr<ReadFile> reader{};
    std::map<std::int64_t, std::int64_t> written{};  // ranges that are there, begin to end
    std::vector<bool> sent{};                        // by part
  };
  struct PartId {
    StorageId file = 0;
    std::int64_t part = 0;
  };
  void note(StorageId storage, std::int64_t offset, std::int64_t size);
  void send(const PartId& id);
  void send_ready();

  FileSink& sink_;
  bool resume_;
  bool completed_ = false;
  std::function<void(std::uint32_t)> finish_;
  std::vector<File> files_;
  std::map<std::pair<StorageId, std::int64_t>, std::uint32_t> ranges_;  // by where they begin
  std::mutex mutex_;
  std::vector<bool> finished_;  // by range
  std::vector<PartId> ready_;
};

}  // namespace ferry::distckpt
