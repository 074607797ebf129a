#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/report/text.h"
#include "distckpt/base/interruption.h"

namespace ferry::cli {
namespace {

using Clock = std::chrono::steady_clock;

volatile std::sig_atomic_t stop_signals = 0;

void request_stop(int) {
  stop_signals = 1;
}

// One stage at a time: its start, and when something was last printed.
class Meter {
 public:
  explicit Meter(bool terminal) : terminal_(terminal) {}

  void show(const converter::Progress& progress) {
    const auto now = Clock::now();
    if (stage_ != progress.stage) {
      stage_ = progress.stage;
      start_ = now;
      printed_ = now - std::chrono::hours(1);
      // The bytes of an interrupted run do not count for the rate of this one.
      first_bytes_ = progress.finished ? 0 : progress.bytes_done;
    }
    const auto pause =
        terminal_ ? std::chrono::milliseconds(90) : std::chrono::milliseconds(10'000);
    if (!progress.finished && now - printed_ < pause) return;
    if (!terminal_ && !progress.finished && now - start_ < pause) return;
    printed_ = now;
    auto line = format(progress, std::chrono::duration<double>(now - start_).count());
    if (terminal_) line.insert(0, "\r\x1b[K");
    if (!terminal_ || progress.finished) line += '\n';
    std::fputs(line.c_str(), stderr);  // a log that takes no more ends no work
    std::fflush(stderr);
  }

 private:
  std::string format(const converter::Progress& progress, double seconds) const {
    const auto total = std::max<std::int64_t>(progress.bytes_total, 1);
    const auto share = static_cast<double>(progress.bytes_done) / static_cast<double>(total);
    const auto rate =
        static_cast<double>(progress.bytes_done - first_bytes_) / std::max(seconds, 1e-3);
    std::string line = fmt::format("{:<15} ", progress.stage);
    if (terminal_) {
      constexpr int kWidth = 30;
      const auto filled = static_cast<int>(share * kWidth);
      line += fmt::format("[{:<{}}] ", std::string(static_cast<std::size_t>(filled), '='), kWidth);
    }
    line += fmt::format("{:3.0f}%  {} of {}", std::floor(share * 100),
                        format_bytes(progress.bytes_done), format_bytes(progress.bytes_total));
    if (seconds > 0.05)
      line += fmt::format("  {}/s", format_bytes(static_cast<std::int64_t>(rate)));
    if (progress.finished) {
      line += fmt::format("  in {}", format_seconds(seconds));
    } else if (rate > 0) {
      const auto left = static_cast<double>(progress.bytes_total - progress.bytes_done) / rate;
      line += fmt::format("  {} left", format_seconds(left));
    }
    return line;
  }

  bool terminal_;
  std::string stage_;
  Clock::time_point start_;
  Clock::time_point printed_;
  std::int64_t first_bytes_ = 0;
};

}  // namespace

void catch_stop_signals() {
  struct sigaction action {};
  action.sa_handler = request_stop;
  action.sa_flags = SA_RESETHAND;
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

bool stop_requested() {
  return stop_signals != 0;
}

converter::ProgressFunction make_progress(bool quiet) {
  catch_stop_signals();
  distckpt::interruption() = stop_requested;
  auto meter = quiet ? nullptr : std::make_shared<Meter>(isatty(STDERR_FILENO) == 1);
  return [meter](const converter::Progress& progress) {
    if (meter) meter->show(progress);
    return !stop_requested();
  };
}

}  // namespace ferry::cli
