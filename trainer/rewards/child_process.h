// A program that is spoken to by lines: its standard input and output are ours, its standard error
// is ours, too. It ends with this object, and with this process, however that ends; so does all
// that it has started (process_guard.h). Where no guard is there, a process group of its own ends
// with this object.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"

namespace ferry::trainer {

// A line of more than 16 MiB.
class LineTooLong : public Error {
 public:
  using Error::Error;
};

class ChildProcess {
 public:
  // `command` is for /bin/sh. Throws Error(kIo).
  explicit ChildProcess(const std::string& command);
  // A program, found as the shell finds it, and its arguments. Throws Error(kIo).
  explicit ChildProcess(const std::vector<std::string>& words);
  // Closes the input and gives the program a second to end by itself. Then it is killed.
  ~ChildProcess();
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  // Tells the program that nothing more comes.
  void close_input() { input_ = {}; }

  // Sends what it takes of `unsent`, which loses that, and receives what there is, for at most so
  // long. Returns a whole line without its end, an empty one too; nothing if none came.
  // Throws LineTooLong, and Error(kIo).
  std::optional<std::string> exchange(std::string_view& unsent, std::chrono::milliseconds limit);

  // True if its output has ended: "exit status 1", "signal 9", "closed its output".
  const std::optional<std::string>& ended() const { return ended_; }

 private:
  std::optional<std::string> take_line();
  void send(std::string_view& unsent);
  void receive();

  // Waits for the end of the program, but no longer than that, and of all that it has started.
  std::optional<int> wait_for_end(std::chrono::milliseconds limit);

  pid_t pid_ = -1;                // the guard's, if there is one
  distckpt::Descriptor guard_{};  // its socket
  distckpt::Descriptor input_;    // the program's
  distckpt::Descriptor output_;
  std::string received_;
  std::optional<std::string> ended_;
};

}  // namespace ferry::trainer
