// ferry: the subcommands of files. Subcommands of models live in a second program beside it,
// which has LibTorch: ferry becomes that program when they are called.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <string_view>
#include <system_error>

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

// Does not return where there is such a program; else it returns why not.
Error become_torch_program(char** argv) {
  std::error_code error;
  const auto self = std::filesystem::read_symlink("/proc/self/exe", error);
  const auto program = self.parent_path() / "ferry-torch";
  // OpenMP reads it when it is loaded. Threads that wait awake take the cores of those that
  // compute.
  setenv("OMP_WAIT_POLICY", "passive", /*overwrite=*/0);
  if (!error) execv(program.c_str(), argv);
  const auto reason = error ? error.value() : errno;
  std::error_code unknown;
  if (!error && std::filesystem::symlink_status(program, unknown).type() !=
                    std::filesystem::file_type::not_found) {
    return {ErrorKind::kIo, fmt::format("{}: cannot be started: {}", program.string(),
                                        std::generic_category().message(reason))};
  }
  return {ErrorKind::kUsage, fmt::format("ferry-torch does not lie beside {}", self.string()),
          "pip install ferry-torch brings it, or in the folder of Ferry's sources "
          "./quickstart --rl"};
}

bool asks_for_help(int argc, char** argv) {
  return std::any_of(argv + 2, argv + argc, [](std::string_view argument) {
    return argument == "--help" || argument == "-h";
  });
}

}  // namespace
}  // namespace ferry::cli

int main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == "guard")  // of the programs of a run
    ferry::trainer::run_guard({argv + 2, argv + argc});
  if (ferry::cli::is_of_models(argc, argv)) {
    const auto refused = ferry::cli::become_torch_program(argv);
    if (!ferry::cli::asks_for_help(argc, argv))
      return ferry::cli::run_program(argc, argv, [&](CLI::App&) { throw refused; });
  }
  return ferry::cli::run_program(argc, argv, ferry::cli::add_file_commands);
}
