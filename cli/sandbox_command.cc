#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/sandbox/sandbox.h"

namespace ferry::cli {

void add_sandbox(CLI::App& app) {
  struct Flags {
    SandboxOptions sandbox{};
    std::string memory = "2GiB";
  };
  auto flags = std::make_shared<Flags>();
  auto& options = flags->sandbox;
  auto* command = app.add_subcommand(
      "sandbox", "Run a program that changes no file and has no network, such as a model's tool");
  command->add_option("COMMAND", options.command, "The program and its arguments, behind --")
      ->required();
  command->add_option("--writable", options.writable, "A folder that it may change")
      ->check(CLI::ExistingDirectory)
      ->type_name("FOLDER")
      ->allow_extra_args(false);
  command->add_option("--memory", flags->memory,
                      "Address space of each of its processes. Default: 2GiB");
  command
      ->add_option("--cpu-seconds", options.cpu_seconds,
                   "CPU time of each of its processes. Default: no bound")
      ->check(CLI::Range(1, 1'000'000'000));
  command
      ->add_option("--processes", options.processes,
                   "Its processes, where it is not root who runs it. Default: 64")
      ->check(CLI::Range(1, 1'000'000));
  command->add_flag("--network", options.network, "It has the network");
  command->footer(
      "Exit status: the program's, 128 + the signal that ended it, 2 where no sandbox can be "
      "made.");
  command->callback([flags] {
    flags->sandbox.memory = parse_size(flags->memory, "--memory");
    const auto status = run_in_sandbox(flags->sandbox);
    if (status != 0) throw CLI::RuntimeError(status);
  });
}

}  // namespace ferry::cli
