#include "cli/program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "cli/report/json.h"
#include "distckpt/base/error.h"
#include "distckpt/base/foreign_error.h"
#include "distckpt/base/nearest_name.h"

namespace ferry::cli {
namespace {

// An error that main() prints may come before the options are parsed.
bool json_requested = false;

std::atomic<bool> memory_ran_out = false;

int trouble(const Error& error) {
  std::fputs(error.report().c_str(), stderr);  // does not throw where it cannot be written
  if (json_requested) std::puts(json_text(error_json(error), -1).c_str());
  return kTrouble;
}

// Memory may run out where nothing can be thrown, as in a destructor. What is said of it is there
// already, since nothing can be allocated any more.
[[noreturn]] void end_at_once() {
  constexpr std::string_view kSaid = "error: out of memory\n";
  constexpr std::string_view kJson =
      "{\"error\":{\"kind\":\"io\",\"message\":\"out of memory\",\"context\":[],\"hint\":\"\"}}\n";
  const auto write_all = [](int fd, std::string_view text) {
    while (!text.empty()) {
      const auto count = ::write(fd, text.data(), text.size());
      if (count <= 0) return;
      text.remove_prefix(static_cast<std::size_t>(count));
    }
  };
  const auto error = std::current_exception();
  bool is_of_memory =
      error == nullptr && memory_ran_out;  // a noexcept of GCC's hides its exception
  try {
    if (error != nullptr) std::rethrow_exception(error);
  } catch (const std::exception& one) {
    is_of_memory = is_out_of_memory(one);
  } catch (
      ...) {  // NOLINT(bugprone-empty-catch): is a defect of this program, as what follows says
  }
  if (!is_of_memory) std::abort();
  write_all(STDERR_FILENO, kSaid);
  if (json_requested) write_all(STDOUT_FILENO, kJson);
  ::_exit(kTrouble);
}

// A checkpoint of a large mesh has more files than a shell allows to be open.
void allow_many_files() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// A file beyond the limit of `ulimit -f` is an error that is told, not a signal that ends the
// program.
void get_errors_of_file_sizes() {
  std::signal(SIGXFSZ, SIG_IGN);
}

// A file that is opened would get the number of a closed one, and the messages of this program
// would land in it.
void open_closed_standard_files() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(fd, F_GETFD) < 0 && ::open("/dev/null", O_RDWR) != fd) return;
}

std::vector<std::string> names_of_subcommands(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* command : app.get_subcommands([](const CLI::App*) { return true; }))
    names.push_back(command->get_name());
  return names;
}

std::vector<std::string> names_of_options(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

// The arguments' wish: the innermost subcommand that they name, and the word in the place of the
// next one, or the first of its options, that is none.
struct Asked {
  std::string command = "ferry";
  std::string unknown{};
  std::vector<std::string> known{};  // in its place
};
Asked what_is_asked(const CLI::App& app, const std::vector<std::string>& arguments) {
  Asked asked;
  const auto* at = &app;
  for (const auto& argument : arguments) {
    const auto names = names_of_subcommands(*at);
    if (names.empty()) {  // its options
      if (argument == "--logits" || argument == "--numerics") asked.command += " " + argument;
      if (argument == "--") break;
      const auto option = argument.substr(0, argument.find('='));
      if (!option.starts_with("--") || at->get_option_no_throw(option) != nullptr) continue;
      if (asked.unknown.empty()) asked.unknown = option;
      asked.known = names_of_options(*at);
      continue;
    }
    if (argument.starts_with("-")) continue;
    if (std::ranges::find(names, argument) == names.end()) {
      asked.unknown = argument;
      asked.known = names;
      return asked;
    }
    asked.command += " " + argument;
    at = at->get_subcommand(argument);
  }
  return asked;
}

// An error of usage without a hint of its own points to the options of what was asked for.
Error with_help(Error error, const Asked& asked) {
  if (error.kind() == ErrorKind::kUsage && error.hint().empty())
    error.set_hint(fmt::format("see {} --help", asked.command));
  return error;
}

Error usage_error(const CLI::ParseError& error, const Asked& asked) {
  if (asked.unknown.empty()) return {ErrorKind::kUsage, error.what()};
  const auto meant = nearest(asked.unknown, asked.known);
  const auto help = fmt::format("see {} --help", asked.command);
  const bool is_option = asked.unknown.starts_with("--");
  return {ErrorKind::kUsage,
          is_option ? fmt::format("{}: is no option of {}", asked.unknown, asked.command)
                    : fmt::format("{}: is no subcommand of {}: {}", asked.unknown, asked.command,
                                  fmt::join(asked.known, ", ")),
          meant ? fmt::format("did you mean {}? {}", *meant, help) : help};
}

// Text that did not get to its file, as on a full disk, is no answer.
void flush_stdout() {
  if (std::fflush(stdout) == 0) return;
  throw Error(ErrorKind::kIo,
              fmt::format("stdout: cannot be written: {}", std::generic_category().message(errno)),
              "the command was carried out, its answer alone is lost: a target is published");
}

int run(int argc,
        char** argv,
        const std::function<void(CLI::App&)>& add_commands,
        const std::function<void(const std::function<void()>&)>& guard) {
  allow_many_files();
  get_errors_of_file_sizes();
  open_closed_standard_files();
  CLI::App app(
      "Carries model weights between Hugging Face and Megatron-Core checkpoints, and proves every "
      "bit.",
      "ferry");
  app.set_version_flag("--version", "ferry " FERRY_VERSION);
  app.require_subcommand(1);
  app.footer("Exit status: 0 yes, 1 no (a difference was found), 2 trouble.");
  add_commands(app);
  const auto asked = what_is_asked(app, {argv + std::min(argc, 1), argv + argc});
  try {
    const auto parse = [&] { app.parse(argc, argv); };
    guard ? guard(parse) : parse();
    return kYes;
  } catch (const CLI::RuntimeError& outcome) {
    return outcome.get_exit_code();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    return trouble(with_help(usage_error(error, asked), asked));
  } catch (const Error& error) {
    return trouble(with_help(error, asked));
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
  std::set_terminate(end_at_once);
  std::set_new_handler([] {
    memory_ran_out = true;
    throw std::bad_alloc();
  });
  try {
    const auto status = run(argc, argv, add_commands, guard);
    if (status != kTrouble) flush_stdout();
    return status;
  } catch (const std::exception& error) {
    return trouble(as_error(error));
  }
}

}  // namespace ferry::cli
