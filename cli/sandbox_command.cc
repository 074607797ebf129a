#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "cli/sandbox/sandbox.h"

namespace ferry::cli {

namespace {

// `list`: paths with colons between them, as a training run names its data and its folder.
void add_hidden(const char* list, std::vector<std::filesystem::path>& hidden) {
  std::string_view rest = list == nullptr ? "" : list;
  while (!rest.empty()) {
    const auto path = rest.substr(0, rest.find(':'));
    rest.remove_prefix(std::min(rest.size(), path.size() + 1));
    if (std::filesystem::exists(path)) hidden.emplace_back(path);
  }
}

}  // namespace

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
                      "Address space of each of its processes, and memory of all together. "
                      "Default: 2GiB");
  command
      ->add_option("--cpu-seconds", options.cpu_seconds,
                   "CPU time of each of its processes. Default: no bound")
      ->check(CLI::Range(1, 1'000'000'000));
  command->add_option("--processes", options.processes, "Its processes and threads. Default: 64")
      ->check(CLI::Range(1, 1'000'000));
  command
      ->add_option("--hide", options.hidden,
                   "A file or folder that is empty for it, beside those of FERRY_SANDBOX_HIDE")
      ->check(CLI::ExistingPath)
      ->type_name("PATH")
      ->allow_extra_args(false);
  command
      ->add_option("--env", options.environment,
                   "A variable that it has: NAME, with its value here, or NAME=VALUE. Default: "
                   "PATH and those of languages alone")
      ->type_name("NAME")
      ->allow_extra_args(false);
  command->add_flag("--network", options.network, "It has the network");
  command->footer(
      "Exit status: the program's, 128 + the signal that ended it, 2 where no sandbox can be "
      "made.");
  command->callback([flags] {
    flags->sandbox.memory = parse_size(flags->memory, "--memory");
    add_hidden(std::getenv("FERRY_SANDBOX_HIDE"), flags->sandbox.hidden);
    const auto status = run_in_sandbox(flags->sandbox);
    if (status != 0) throw CLI::RuntimeError(status);
  });
}

}  // namespace ferry::cli
