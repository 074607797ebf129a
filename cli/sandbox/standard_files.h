// Standard input, output and error of a sandbox. A program could open a regular file among them
// again, by /proc/self/fd, and write to it where all files are read-only: it gets a pipe instead,
// to or from which a process outside the sandbox copies.
#pragma once

#include <sys/types.h>

#include <vector>

#include "distckpt/storage/file_io.h"

namespace ferry::cli {

class StandardFiles {
 public:
  // Puts pipes in place of this process's own standard files that are regular files. Called while
  // it has one thread, outside of the sandbox. Throws Error(kIo).
  StandardFiles();
  // Puts the files back once all that has the pipes is gone, and waits for what is still copied.
  ~StandardFiles();
  StandardFiles(const StandardFiles&) = delete;
  StandardFiles& operator=(const StandardFiles&) = delete;

 private:
  struct Replaced {
    int number = 0;
    distckpt::Descriptor file{};
    pid_t copier = -1;  // none where output and error are one file, which one process copies
  };
  std::vector<Replaced> replaced_;
};

}  // namespace ferry::cli
