#include "distckpt/execute/rendezvous.h"

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"

namespace ferry::distckpt {
namespace fs = std::filesystem;
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPoll = std::chrono::milliseconds(20);
constexpr std::int64_t kMaxFile = 1 << 20;

std::optional<int> from_environment(const char* name) {
  const char* const text = std::getenv(name);
  if (text == nullptr || *text == '\0') return std::nullopt;
  const std::string_view value(text);
  int number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  require(error == std::errc() && end == value.data() + value.size() && number >= 0,
          ErrorKind::kUsage, "{}={}: is not a number of ranks", name, value);
  return number;
}

std::string random_word() {
  std::random_device device;
  return fmt::format("{:08x}{:08x}-{}", device(), device(), ::getpid());
}

// Nothing if it is not there, or not there any more.
std::optional<std::string> try_read(const fs::path& path) {
  try {
    if (!fs::exists(path)) return std::nullopt;
    return read_text(path, kMaxFile);
  } catch (const Error&) {
    return std::nullopt;
  }
}

std::vector<std::string> lines(std::string_view text) {
  std::vector<std::string> found;
  while (!text.empty()) {
    const auto end = text.find('\n');
    found.emplace_back(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return found;
}

fs::path numbered(const fs::path& folder, std::string_view name, int rank) {
  return folder / fmt::format("{}.{}", name, rank);
}

}  // namespace

RankOfJob rank_from_environment() {
  constexpr std::pair<const char*, const char*> kNames[] = {
      {"RANK", "WORLD_SIZE"},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
      {"PMI_RANK", "PMI_SIZE"},
      {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},  // of a step: not set for a batch script itself
  };
  for (const auto& [rank_name, size_name] : kNames) {
    const auto rank = from_environment(rank_name);
    const auto size = from_environment(size_name);
    if (!rank || !size) continue;
    require(*rank < *size, ErrorKind::kUsage, "{}={} of {}={}: there is no such rank", rank_name,
            *rank, size_name, *size);
    return {.rank = *rank, .size = *size};
  }
  return {};
}

Rendezvous::Rendezvous(fs::path folder,
                       const RankOfJob& job,
                       std::string_view agreement,
                       RendezvousOptions options)
    : folder_(std::move(folder)), job_(job), options_(std::move(options)) {
  if (job_.rank == 0) {
    meet_as_first(agreement);
  } else {
    meet_as_other(agreement);
  }
  heart_ = std::jthread([this](const std::stop_token& stop) { beat(stop); });
}

Rendezvous::~Rendezvous() = default;

// Each rank says hello with a word of its own; rank 0 answers with a session that repeats all
// words, anew whenever one changes: a hello may be an earlier run's. Each joins the session that
// has its word, and any later one, until rank 0 has seen all in the same and opens it.
void Rendezvous::meet_as_first(std::string_view agreement) {
  fs::create_directories(folder_);
  const auto start = Clock::now();
  std::vector<std::string> words(static_cast<std::size_t>(job_.size));
  while (true) {
    bool all = true;
    bool changed = session_.empty();
    for (int rank = 1; rank < job_.size; ++rank) {
      const auto word = try_read(numbered(folder_, "hello", rank));
      auto& known = words[static_cast<std::size_t>(rank)];
      if (!word) all = false;
      if (word && *word != known) {
        known = *word;
        changed = true;
      }
    }
    if (all && changed) {
      session_ = random_word();
      fs::create_directories(folder_ / session_);
      std::string text = session_ + "\n" + std::string(agreement) + "\n";
      for (const auto& word : words) text += word + "\n";
      replace_text(folder_ / "session", text);
    }
    if (all) {
      int joined = 1;
      for (int rank = 1; rank < job_.size; ++rank)
        joined += fs::exists(session_file("joined", rank)) ? 1 : 0;
      if (joined == job_.size) return write_text(session_file("open", 0), "");
      check_others("joined");
    }
    const auto waited = Clock::now() - start;
    if (waited > options_.notice && options_.late) {
      if (const auto missing = list_missing(); !missing.empty())
        std::exchange(options_.late, {})(missing.front());
    }
    if (waited > options_.patience) {
      const auto missing = list_missing();
      throw Error(
          ErrorKind::kCancelled,
          fmt::format("of {} ranks these have not come: {}", job_.size, fmt::join(missing, ", ")),
          "do they see the same file system? --no-ranks works alone");
    }
    pause();
  }
}

// The ranks that have not come yet, on rank 0.
std::vector<int> Rendezvous::list_missing() const {
  std::vector<int> missing;
  for (int rank = 1; rank < job_.size; ++rank) {
    if (session_.empty() ? !fs::exists(numbered(folder_, "hello", rank))
                         : !fs::exists(session_file("joined", rank)))
      missing.push_back(rank);
  }
  return missing;
}

void Rendezvous::meet_as_other(std::string_view agreement) {
  const auto start = Clock::now();
  const auto word = random_word();
  const auto hello = numbered(folder_, "hello", job_.rank);
  while (true) {
    if (options_.look) options_.look();
    if (fs::is_directory(folder_) && try_read(hello) != word) {
      try {
        replace_text(hello, word);
      } catch (const Error&) {
        // Rank 0 may be clearing away what an earlier run left.
      }
    }
    const auto text = try_read(folder_ / "session");
    const auto said = lines(text.value_or(""));
    const auto mine = static_cast<std::size_t>(job_.rank) + 2;
    if (said.size() == static_cast<std::size_t>(job_.size) + 2 && said[mine] == word) {
      session_ = said[0];
      if (said[1] != agreement) {
        fail("it was given another source, other options or another version of them");
        throw Error(ErrorKind::kUsage,
                    fmt::format("rank {} was not given what rank 0 was", job_.rank),
                    "run the same command on all ranks, with the same files");
      }
      if (!fs::exists(session_file("joined", job_.rank)))
        write_text(session_file("joined", job_.rank), "");
      if (fs::exists(session_file("open", 0))) return;
      check_failures();
    }
    if (Clock::now() - start > options_.patience) {
      throw Error(ErrorKind::kCancelled,
                  fmt::format("rank {} of {} waited for rank 0 in vain", job_.rank, job_.size),
                  "do they see the same file system? --no-ranks works alone");
    }
    pause();
  }
}

void Rendezvous::leave(std::string_view name) {
  if (job_.rank == 0) barrier(name);
  heart_.request_stop();
  heart_.join();
  if (job_.rank != 0) write_text(session_file(name, job_.rank), "");
}

void Rendezvous::barrier(std::string_view name) {
  write_text(session_file(name, job_.rank), "");
  for (int rank = 0; rank < job_.size; ++rank) {
    while (!fs::exists(session_file(name, rank))) {
      check_others(name);
      pause();
    }
  }
}

void Rendezvous::fail(std::string_view message) noexcept {
  try {
    replace_text(session_file("failed", job_.rank), message);
  } catch (...) {
    // They will find this rank silent.
  }
}

void Rendezvous::beat(const std::stop_token& stop) {
  for (std::uint64_t count = 0; !stop.stop_requested(); ++count) {
    try {
      replace_text(session_file("beat", job_.rank), std::to_string(count));
    } catch (const Error&) {
      return;  // the folder is gone: the work is done
    }
    const auto until = Clock::now() + options_.heartbeat;
    while (!stop.stop_requested() && Clock::now() < until) std::this_thread::sleep_for(kPoll);
  }
}

void Rendezvous::check_failures() const {
  require(fs::exists(folder_ / session_), ErrorKind::kCancelled,
          "rank 0 has given up, and removed {}", folder_.string());
  for (int rank = 0; rank < job_.size; ++rank) {
    if (rank == job_.rank) continue;
    if (const auto failure = try_read(session_file("failed", rank))) {
      throw Error(ErrorKind::kCancelled, fmt::format("rank {} failed: {}", rank, *failure),
                  "once its cause is gone, run the same command again with --resume");
    }
  }
}

// Compares what others' hearts say with what they said before, by this process's clock.
void Rendezvous::check_others(std::string_view waiting_for) {
  check_failures();
  for (int rank = 0; rank < job_.size; ++rank) {
    // A rank that has come may have left as well.
    if (rank == job_.rank || fs::exists(session_file(waiting_for, rank))) continue;
    const auto beat = try_read(session_file("beat", rank)).value_or("");
    auto& heard = heard_[rank];
    if (heard.beat != beat || heard.at == Clock::time_point{}) heard = {beat, Clock::now()};
    if (Clock::now() - heard.at > options_.silence) {
      throw Error(ErrorKind::kCancelled,
                  fmt::format("rank {} of {} has fallen silent", rank, job_.size),
                  "run the same command again with --resume: what is done is not done again");
    }
  }
}

void Rendezvous::pause() const {
  if (options_.go_on && !options_.go_on()) throw Error(ErrorKind::kCancelled, "interrupted");
  std::this_thread::sleep_for(kPoll);
}

fs::path Rendezvous::session_file(std::string_view name, int rank) const {
  return numbered(folder_ / session_, name, rank);
}

}  // namespace ferry::distckpt
