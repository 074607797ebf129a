// The memory of all processes of a sandbox together, which no limit of a process bounds: the first
// process of the sandbox looks at it ten times a second.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace ferry::cli {

// Keeps signals of children for wait_for_program(), before the program is started; in the program
// allow_signals_of_children() undoes this.
void keep_signals_of_children();
void allow_signals_of_children();

// Called by the first process of a pid namespace. Waits for all children, until the program has
// ended, and returns its status as waitpid() does. If all processes together hold more than
// `memory` bytes, pages that several share counted once, it says so and kills them all.
// `own_network`: the sockets of its network namespace are those of these processes.
int wait_for_program(pid_t program, std::int64_t memory, bool own_network);

}  // namespace ferry::cli
