/* Static HDF5 is compiled for programs, which copy the addresses of stdout and stderr out of the C
   library when they start; a module cannot. The linker's --wrap makes the two names of these. */
#define _GNU_SOURCE /* for what follows in the same unit */
#include <stdio.h>

extern FILE* __real_stderr;
extern FILE* __real_stdout;
FILE* __wrap_stderr;
FILE* __wrap_stdout;

__attribute__((constructor)) static void find_streams(void) {
  __wrap_stderr = __real_stderr;
  __wrap_stdout = __real_stdout;
}
