// A file that only grows, a whole record at a time: a run that is killed leaves whole records, at
// most the last of them cut off.
#pragma once

#include <filesystem>
#include <string_view>

#include "distckpt/storage/file_io.h"

namespace ferry::trainer {

class AppendFile {
 public:
  // Creates the file, and its folders, unless they are there. Throws Error(kIo).
  explicit AppendFile(std::filesystem::path path);

  const std::filesystem::path& path() const { return path_; }
  void append(std::string_view bytes) const;

 private:
  std::filesystem::path path_;
  distckpt::Descriptor fd_;
};

}  // namespace ferry::trainer
