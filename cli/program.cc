#include "cli/program.h"

#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <string_view>

#include "cli/commands.h"
#include "cli/report/json.h"
#include "distckpt/error.h"
#include "distckpt/foreign_error.h"

namespace ferry::cli {
namespace {

// An error that main() prints may come before the options are parsed.
bool json_requested = false;

int trouble(const Error& error) {
  fmt::print(stderr, "{}", error.report());
  if (json_requested) fmt::print("{}\n", error_json(error).dump());
  return kTrouble;
}

// A checkpoint of a large mesh has more files than a shell allows to be open.
void allow_many_files() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

int run(int argc,
        char** argv,
        const std::function<void(CLI::App&)>& add_commands,
        const std::function<void(const std::function<void()>&)>& guard) {
  allow_many_files();
  CLI::App app(
      "Carries model weights between Hugging Face and Megatron-Core checkpoints, and proves every "
      "bit.",
      "ferry");
  app.set_version_flag("--version", "ferry " FERRY_VERSION);
  app.require_subcommand(1);
  app.footer("Exit status: 0 yes, 1 no (a difference was found), 2 trouble.");
  add_commands(app);
  try {
    const auto parse = [&] { app.parse(argc, argv); };
    guard ? guard(parse) : parse();
    return kYes;
  } catch (const CLI::RuntimeError& outcome) {
    return outcome.get_exit_code();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return trouble(
        Error(ErrorKind::kUsage, error.what(), "see ferry --help, ferry convert --help"));
  }
}

}  // namespace

int run_program(int argc,
                char** argv,
                const std::function<void(CLI::App&)>& add_commands,
                const std::function<void(const std::function<void()>&)>& guard) noexcept {
  json_requested = std::any_of(argv, argv + argc, [](const char* argument) {
    return std::string_view(argument) == "--json";
  });
  try {
    return run(argc, argv, add_commands, guard);
  } catch (const std::exception& error) {
    return trouble(as_error(error));
  }
}

}  // namespace ferry::cli
