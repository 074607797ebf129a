// The files that something is read from, as each was when it was first opened: what is read in many
// opens, over hours, comes from one state of the folder or is an error.
#pragma once

#include <filesystem>
#include <map>

#include "distckpt/storage/file_io.h"

namespace ferry::distckpt {

class SourceFiles {
 public:
  // Adds the file. Throws Error(kIo) if it was added before and is not the same any more,
  // Error(kCorrupt) if it is a pointer of git-lfs.
  void add(const ReadFile& file);

  // Throws Error(kIo) unless the file is as it was when it was added; others may be anything.
  void require_same(const ReadFile& file) const;

  // The same of all of them, by their paths.
  void require_unchanged() const;

  // Returns once a change of any of them would show: clocks of file systems tick every few
  // milliseconds, and a file that was written in this very tick could be written again in it.
  void settle() const;

  const std::map<std::filesystem::path, FileIdentity>& files() const { return files_; }

 private:
  friend class ReadFile;
  friend class NotedFiles;
  static void note(const ReadFile& file);

  std::map<std::filesystem::path, FileIdentity> files_;
};

// Adds to `files` whatever this thread opens to read while it lives. One at a time is in force, the
// innermost.
class NotedFiles {
 public:
  explicit NotedFiles(SourceFiles& files);
  ~NotedFiles();
  NotedFiles(const NotedFiles&) = delete;
  NotedFiles& operator=(const NotedFiles&) = delete;

 private:
  SourceFiles* before_;
};

}  // namespace ferry::distckpt
