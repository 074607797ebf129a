// The user that a program in a sandbox is. The kernel bounds no number of root's processes, so that
// where root makes the sandbox the program is a user of its own, nobody. It then still reads root's
// files, by two capabilities (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH) that hold inside of the
// sandbox alone, where all is read-only.
#pragma once

namespace ferry::cli {

// Enters a user namespace and those of `flags`. Returns whether become_nobody() is to follow.
// Throws Error(kUsage) if the system does not allow it. The process has one thread.
bool enter_user_namespace(int flags);

// In a process of that namespace, which then becomes the program.
void become_nobody();

}  // namespace ferry::cli
