// ferry: the subcommands of files. Subcommands of models live in a second program beside it,
// which has LibTorch: ferry becomes that program when they are called.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string_view>

#include "cli/program.h"
#include "distckpt/base/error.h"
#include "trainer/rewards/process_guard.h"

namespace ferry::cli {
namespace {

bool is_of_models(int argc, char** argv) {
  const std::string_view command = argc > 1 ? argv[1] : "";
  if (command == "bench" || command == "generate" || command == "serve" || command == "train")
    return true;
  return command == "verify" && std::any_of(argv + 2, argv + argc, [](std::string_view argument) {
           return argument == "--logits" || argument == "--numerics";
         });
}

// Does not return where there is such a program.
void become_torch_program(char** argv) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto program = self.parent_path() / "ferry-torch";
  // OpenMP reads it when it is loaded. Threads that wait awake take the cores of those that
  // compute.
  setenv("OMP_WAIT_POLICY", "passive", /*overwrite=*/0);
  if (!error) execv(program.c_str(), argv);
}

}  // namespace
}  // namespace ferry::cli

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "guard")  // of the programs of a run
    ferry::trainer::run_guard({argv + 2, argv + argc});
  if (ferry::cli::is_of_models(argc, argv)) {
    ferry::cli::become_torch_program(argv);
    return ferry::cli::run_program(argc, argv, [](CLI::App&) {
      throw ferry::Error(ferry::ErrorKind::kUsage, "ferry-torch does not lie beside ferry",
                         "./quickstart --rl builds it, in the folder of Ferry's sources");
    });
  }
  return ferry::cli::run_program(argc, argv, ferry::cli::add_file_commands);
}
