// A checkpoint appears whole or not at all. It is written in a working folder beside its target,
// which one run at a time may own, and published by a rename; what an interrupted run left there
// can be resumed.
#pragma once

#include <filesystem>
#include <vector>

#include "distckpt/file_io.h"

namespace ferry::distckpt {

class WorkFolder {
 public:
  // Creates "<parent>/.<name>.ferry" and locks it. Unless `resume` is set, what an interrupted run
  // left in it is removed first. Throws Error(kUsage) if another run holds it, Error(kIo) if it
  // cannot be created.
  WorkFolder(std::filesystem::path target, bool resume);

  // Unless published or kept, removes the working folder and the parents it made.
  ~WorkFolder();
  WorkFolder(const WorkFolder&) = delete;
  WorkFolder& operator=(const WorkFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path output() const;  // what will become the target
  std::filesystem::path journal() const;

  // Leaves the folder behind, for --resume.
  void keep() { keep_ = true; }

  // True if an interrupted run got as far as publishing `target`, and only its working folder is
  // left to be removed.
  static bool published_earlier(const std::filesystem::path& target);

  // Makes output() the target, durably and atomically. A target that is there is exchanged with it
  // if `overwrite` is set, and removed afterwards; else, unless it is an empty folder,
  // Error(kUsage).
  void publish(bool overwrite);

 private:
  std::filesystem::path target_;
  std::filesystem::path path_;
  std::vector<std::filesystem::path> made_parents_;  // outermost first
  Descriptor lock_;
  bool keep_ = false;
};

// A file replaced atomically: the tracker.
void replace_text(const std::filesystem::path& path, std::string_view text);

}  // namespace ferry::distckpt
