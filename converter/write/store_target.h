// A target in a bucket of S3. Weights go there while they are written; the small files (of an
// archive, all) follow when everything is proved, the one that makes it a checkpoint last. There is
// no rename: until then the folder holds none.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "distckpt/execute/upload_sink.h"

namespace ferry::converter {

class StoreTarget {
 public:
  // `files` are all that will be written, relative, below `local` at first. Throws Error(kUsage) if
  // the bucket's folder holds another, or any without `overwrite`.
  StoreTarget(const std::filesystem::path& address,
              std::filesystem::path local,
              const std::vector<std::filesystem::path>& files,
              bool overwrite);

  // Unless published, what this run put is removed, and readers of this process see the store
  // again.
  ~StoreTarget();
  StoreTarget(const StoreTarget&) = delete;
  StoreTarget& operator=(const StoreTarget&) = delete;

  // The place of a file whose size will be `bytes`.
  distckpt::UploadedFile weights(const std::filesystem::path& name, std::int64_t bytes);

  // Nobody takes the folder for a checkpoint any more. What was there is gone from now on. Throws
  // as require_alone() does.
  void unseal();

  // The objects of weights are there. This process reads the small files that are still local as if
  // they were there, too.
  void weights_are_there();

  // Sends the files that are still local, in their order, but those that make it a checkpoint
  // last. Throws Error(kUsage) if another run writes there, too.
  void publish();

 private:
  // Without --overwrite a folder that was empty holds no objects but this run's weights. Throws
  // Error(kUsage): another run has the same target, and was faster.
  void require_alone() const;
  distckpt::S3Place place(const std::filesystem::path& name) const;
  std::vector<std::filesystem::path> small_files() const;  // in the order of their sending

  distckpt::S3Place folder_;
  std::filesystem::path local_;
  std::vector<std::filesystem::path> files_;
  std::vector<std::filesystem::path> weights_;
  std::vector<std::filesystem::path> there_;  // before
  distckpt::S3Claim claim_;
  bool put_ = false;
  bool published_ = false;
};

// A folder of this machine for what is on its way to the address: the same for each run.
std::filesystem::path buffer_folder(const std::filesystem::path& address);

// Puts a text beside the folder, such as the tracker.
void put_beside(const std::filesystem::path& address, std::string_view name, std::string_view text);

}  // namespace ferry::converter
