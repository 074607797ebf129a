// ferry-torch: the subcommands of models. ferry runs it.
#include <malloc.h>

#include "cli/program.h"
#include "cli/torch/commands.h"
#include "cli/torch/library_error.h"

namespace {

// glibc's default maps each large tensor of a step anew and pays for its pages every time. Blocks
// below 32 MiB, the largest limit that glibc takes, stay in the process instead: a step of a small
// model on the host takes 16 % less time (docs/benchmarks.md).
void keep_pages_of_freed_tensors() {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
}

}  // namespace

int main(int argc, char** argv) {
  keep_pages_of_freed_tensors();
  const auto add_commands = [](CLI::App& app) {
    ferry::cli::add_verify_models(app);
    ferry::cli::add_bench(app);
    ferry::cli::add_generate(app);
    ferry::cli::add_serve(app);
    ferry::cli::add_train(app);
  };
  return ferry::cli::run_program(argc, argv, add_commands, [](const std::function<void()>& body) {
    try {
      body();
    } catch (const c10::Error& error) {
      throw ferry::cli::library_error(error);
    }
  });
}
