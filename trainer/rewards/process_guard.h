// A process between a program and the one that started it, so that nothing of the program outlives
// that one, not even if it is killed by SIGKILL.
//
// `ferry guard FD PROGRAM...` (or `ferry-torch guard`, where that program lies alone, as in its
// wheel) is started in place of PROGRAM, with one end of a pair of sockets. It
// starts PROGRAM in a process group of its own and adopts what PROGRAM leaves behind
// (PR_SET_CHILD_SUBREAPER), also in other groups and sessions. The kernel closes the other end with
// whoever holds it.
#pragma once

#include <string>
#include <vector>

#include "distckpt/storage/file_io.h"

namespace ferry::trainer {

// The socket's other end is told...
inline constexpr char kEndWithProgram = 'e';  // ...not to wait for what the program has started

// Words that run `words` under a guard which reads file `fd`. Nothing where this program is neither
// ferry-torch nor beside ferry, as a test is: then nobody guards.
std::vector<std::string> guarded(const std::vector<std::string>& words, int fd);

// The guard. Writes the errno of starting the program, 0 if it runs, as an int to `socket`. Returns
// when neither the program nor anything that it has started is there any more, the program's
// status, as of waitpid(). When the socket's other end closes, the program has a second to end by
// itself; then all are killed. Throws Error(kIo) if it cannot watch over a program.
int guard_program(const distckpt::Descriptor& socket, const std::vector<std::string>& words);

// `ferry guard`: does not return. `words`: FD and the program's.
[[noreturn]] void run_guard(const std::vector<std::string>& words) noexcept;

}  // namespace ferry::trainer
