// A folder that is written in secret and published whole: here by rename, in a bucket of S3 file by
// file, the last of which makes it one.
#pragma once

#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "converter/open/checkpoint.h"
#include "converter/write/store_target.h"
#include "distckpt/storage/work_folder.h"

namespace ferry::converter {

// Permissions of what is made of checkpoints: narrower than each of their files and folders.
distckpt::PublishedModes modes_like(std::initializer_list<const Checkpoint*> sources);

class Publication {
 public:
  // `target` is resolve_target()'s. Throws Error(kUsage) if it is there, and not an empty folder;
  // else as WorkFolder does.
  explicit Publication(const std::filesystem::path& target);

  const distckpt::WorkFolder& work() const { return work_; }
  std::filesystem::path output() const { return work_.output(); }  // where to write

  // All files that will be written, relative; in a bucket they appear in this order. Throws
  // Error(kUsage) if its folder holds objects already.
  void expect(const std::vector<std::filesystem::path>& files);

  void publish(const distckpt::PublishedModes& modes);

  // After it: replaces a file beside the target (the tracker).
  void replace_beside(std::string_view name, std::string_view text, unsigned mode) const;

 private:
  std::filesystem::path target_;
  distckpt::WorkFolder work_;
  std::optional<StoreTarget> store_;
};

}  // namespace ferry::converter
