#include <fmt/format.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>

#include "cli/commands.h"
#include "cli/report/run/watch_page.h"
#include "distckpt/base/error.h"
#include "trainer/metrics/metric_log.h"

namespace ferry::cli {
namespace {

namespace fs = std::filesystem;

struct WatchFlags {
  fs::path run{};
  double interval = 2;
  bool once = false;
};

bool speaks_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') continue;
    const std::string_view locale = value;
    return locale.find("UTF-8") != std::string_view::npos ||
           locale.find("utf8") != std::string_view::npos;
  }
  return false;
}

// The terminal, which is as before when this ends: a second page without a cursor, keys as they are
// typed.
class Terminal {
 public:
  Terminal() {
    reads_keys_ = isatty(STDIN_FILENO) == 1 && tcgetattr(STDIN_FILENO, &before_) == 0;
    if (reads_keys_) {
      auto mode = before_;
      mode.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO);
      tcsetattr(STDIN_FILENO, TCSANOW, &mode);
    }
    say("\x1b[?1049h\x1b[?25l");
  }
  ~Terminal() {
    say("\x1b[?25h\x1b[?1049l");
    if (reads_keys_) tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  WatchScreen screen() const {
    winsize size{};
    WatchScreen screen{.unicode = speaks_utf8()};
    if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0)
      return screen;
    screen.columns = size.ws_col;
    screen.rows = size.ws_row;
    return screen;
  }

  void show(const std::vector<std::string>& lines) const {
    std::string frame = "\x1b[H";
    for (std::size_t i = 0; i < lines.size(); ++i)
      frame += (i == 0 ? "" : "\n") + lines[i] + "\x1b[K";
    say(frame + "\x1b[J");
  }

  // False if the user asks to end.
  bool wait(double seconds) const {
    pollfd key{.fd = reads_keys_ ? STDIN_FILENO : -1, .events = POLLIN, .revents = 0};
    if (poll(&key, 1, static_cast<int>(seconds * 1000)) > 0) {
      char typed = 0;
      if (read(STDIN_FILENO, &typed, 1) != 1 || typed == 'q' || typed == 4) return false;
    }
    return !stop_requested();
  }

 private:
  static void say(const std::string& text) {
    fmt::print("{}", text);
    std::fflush(stdout);
  }

  termios before_{};
  bool reads_keys_ = false;
};

// Reads the run again where its metrics changed.
class WatchedRun {
 public:
  explicit WatchedRun(fs::path run) : run_(std::move(run)) {}

  // Lines for the screen. A run that has no metrics yet is waited for.
  std::vector<std::string> page(const WatchScreen& screen) {
    const auto metrics = fs::is_directory(run_) ? run_ / trainer::kMetricsFile : run_;
    std::error_code none;
    const auto size = fs::file_size(metrics, none);
    if (none) return {"no metrics yet (q ends)"};
    if (!log_ || size != size_) log_ = trainer::read_run(run_);
    size_ = size;
    return watch_page(*log_, trainer::wall_time(), screen);
  }

 private:
  fs::path run_;
  std::optional<trainer::RunLog> log_{};
  std::uintmax_t size_ = 0;
};

void watch(const WatchFlags& flags) {
  require(fs::exists(flags.run), ErrorKind::kNotFound, "{}: is not there", flags.run.string());
  if (flags.once || isatty(STDOUT_FILENO) != 1) {
    const WatchScreen screen{.columns = 100, .rows = 1000, .unicode = speaks_utf8()};
    for (const auto& line : watch_page(trainer::read_run(flags.run), trainer::wall_time(), screen))
      fmt::print("{}\n", line);
    return;
  }
  WatchedRun run(flags.run);
  catch_stop_signals();
  const Terminal terminal;
  do terminal.show(run.page(terminal.screen()));
  while (terminal.wait(flags.interval));
}

}  // namespace

void add_watch(CLI::App& app) {
  auto flags = std::make_shared<WatchFlags>();
  auto* command = app.add_subcommand("watch", "Show how a training run goes, in the terminal");
  command->add_option("RUN", flags->run, "The folder of a run, or its metrics.jsonl")->required();
  command->add_option("--interval", flags->interval, "Seconds between two looks at the run")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  command->add_flag("--once", flags->once,
                    "Print the page once. Default where stdout is no terminal");
  command->footer("q ends it. Exit status: 0, or 2 trouble.");
  command->callback([command, flags] {
    require_effective(*command, {{.here = flags->once,
                                  .options = {"--interval"},
                                  .why = "--once looks at the run a single time"},
                                 {.here = isatty(STDOUT_FILENO) != 1,
                                  .options = {"--interval"},
                                  .why = "where stdout is no terminal, the page is printed once"}});
    watch(*flags);
  });
}

}  // namespace ferry::cli
