// ferry-torch: the subcommands of models. ferry runs it.
#include <malloc.h>
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <string_view>

#include "cli/torch/torch_program.h"
#include "trainer/rewards/process_guard.h"

namespace {

// glibc's default maps each large tensor of a step anew and pays for its pages every time. Blocks
// below 32 MiB, the largest limit that glibc takes, stay in the process instead: a step of a small
// model on the host takes 16 % less time (docs/benchmarks.md).
void keep_pages_of_freed_tensors() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
}

// LibTorch takes back each of its operators at a process's end, for a third of the time that an
// empty command takes. All that is worth an end has had it: scopes of main() are left.
[[noreturn]] void end_at_once(int status) {
  std::cout.flush();
  std::fflush(nullptr);
  _exit(status);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "guard")  // where there is no ferry for it
    ferry::trainer::run_guard({argv + 2, argv + argc});
  keep_pages_of_freed_tensors();
  end_at_once(ferry::cli::run_torch_program(argc, argv));
}
