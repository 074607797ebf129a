#include "models/distributed/failure_board.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <numeric>
#include <sstream>
#include <system_error>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "models/distributed/world.h"

namespace ferry::models {
namespace {

using Store = c10::intrusive_ptr<c10d::Store>;
using std::chrono::milliseconds;

constexpr const char* kToAll = "failure/to-all";
constexpr const char* kQuestion = "failure/who-is-alive";
constexpr auto kMoment = milliseconds(2000);  // in which ranks that fail together have all done so
constexpr auto kPatience = milliseconds(6000);  // with ranks that learn of it (nccl_backend.cc)
constexpr auto kAnswer = milliseconds(4000);    // in which a rank that lives has said so
constexpr auto kPoll = milliseconds(50);
constexpr auto kPresencePoll = milliseconds(500);

std::string announcement_of(int rank) {
  return fmt::format("failure/{}", rank);
}
std::string mark_of_failure_to(int rank) {
  return fmt::format("failure/to/{}", rank);
}
std::string limit_of(int rank) {
  return fmt::format("failure/limit/{}", rank);
}
std::string alive_mark(int rank) {
  return fmt::format("failure/alive/{}", rank);
}
std::string progress_of(const std::string& name) {
  return fmt::format("failure/progress/{}", name);
}

// The number of the last question that a rank has answered. Questions are numbered from 1; 0 means
// that the rank will answer.
std::int64_t last_answer(c10d::Store& store, int rank) {
  const auto text = store.get(alive_mark(rank));
  return std::stoll(std::string(text.begin(), text.end()));
}

std::vector<std::uint8_t> bytes_of(const std::string& text) {
  return {text.begin(), text.end()};
}

bool succeeds(const std::function<void()>& body) {
  try {
    body();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

enum class Outcome : std::uint8_t { kDone, kSlow, kGone };

// Runs `body`, which talks to the store, on a thread of its own, which is left behind if the store
// is slow to answer. `body` must own everything that it refers to.
Outcome ask(milliseconds limit, const std::function<void()>& body) {
  const auto outcome = [body] { return succeeds(body) ? Outcome::kDone : Outcome::kGone; };
  const auto done = std::make_shared<std::promise<Outcome>>();
  auto result = done->get_future();
  try {
    std::thread([outcome, done] { done->set_value(outcome()); }).detach();
  } catch (const std::system_error&) {  // threads have run out, perhaps this is what is to be told
    return outcome();
  }
  return result.wait_for(limit) == std::future_status::ready ? result.get() : Outcome::kSlow;
}

bool within(milliseconds limit, const std::function<void()>& body) {
  return ask(limit, body) == Outcome::kDone;
}

// The ranks that a failure of `rank` concerns; all if none are listed.
std::vector<int> concerned(c10d::Store& store, int rank) {
  if (!store.check({limit_of(rank)})) return {};
  const auto text = store.get(limit_of(rank));
  std::istringstream list(std::string(text.begin(), text.end()));
  return {std::istream_iterator<int>(list), {}};
}

}  // namespace

void limit_failure(const World& world, const std::vector<int>& ranks) {
  if (!world.store()) return;
  world.store()->set(limit_of(world.rank()), bytes_of(fmt::format("{}", fmt::join(ranks, " "))));
}

void announce_failure(const World& world, const Error& error) {
  if (!world.store()) return;
  std::string why = error.what();
  for (const auto& frame : error.context()) why += "; while " + frame;
  if (!error.hint().empty()) why += "; hint: " + error.hint();
  within(kMoment, [store = world.store(), rank = world.rank(), why] {
    store->set(announcement_of(rank), bytes_of(why));
    const auto ranks = concerned(*store, rank);
    if (ranks.empty()) store->set(kToAll, bytes_of(why));
    for (const int one : ranks) store->set(mark_of_failure_to(one), bytes_of(why));
  });
}

void wait_for_failures(const World& world) {
  if (!world.store()) return;
  // The store ends with its owner, so rank 0 leaves last, after the others have read the
  // announcements.
  const auto patience = kPatience + (world.rank() == 0 ? kMoment : milliseconds(0));
  within(patience, [store = world.store(), rank = world.rank(), size = world.size(), patience] {
    const auto until = std::chrono::steady_clock::now() + patience;
    auto ranks = concerned(*store, rank);
    if (ranks.empty()) {
      ranks.resize(static_cast<std::size_t>(size));
      std::iota(ranks.begin(), ranks.end(), 0);
    }
    std::vector<std::string> keys(ranks.size());
    std::ranges::transform(ranks, keys.begin(), announcement_of);
    while (!store->check(keys) && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(kPoll);
  });
  if (world.rank() == 0) std::this_thread::sleep_for(4 * kPoll);
}

bool failure_announced(const Store& store, int rank) {
  const auto found = std::make_shared<bool>(false);
  const auto outcome = ask(kMoment, [store, rank, found] {
    *found = store->check({kToAll}) || store->check({mark_of_failure_to(rank)});
  });
  return outcome == Outcome::kGone || (outcome == Outcome::kDone && *found);
}

void count_progress(const Store& store, const std::string& name) {
  within(kMoment, [store, name] { store->add(progress_of(name), 1); });
}

std::optional<std::int64_t> progress(const Store& store, const std::string& name) {
  const auto count = std::make_shared<std::int64_t>(0);
  const bool answered =
      within(kMoment, [store, name, count] { *count = store->add(progress_of(name), 0); });
  return answered ? std::optional(*count) : std::nullopt;
}

bool is_alive(const Store& store, int rank) {
  const auto found = std::make_shared<bool>(false);
  within(kAnswer + kMoment, [store, rank, found] {
    *found = !store->check({alive_mark(rank)});
    const auto question = store->add(kQuestion, 1);
    const auto until = std::chrono::steady_clock::now() + kAnswer;
    while (!*found && std::chrono::steady_clock::now() < until) {
      *found = last_answer(*store, rank) >= question;
      std::this_thread::sleep_for(kPoll);
    }
  });
  return *found;
}

std::shared_ptr<void> stay_present(const Store& store, int rank) {
  const auto here = std::make_shared<std::atomic<bool>>(true);
  std::thread([store, rank, here] {
    try {
      store->set(alive_mark(rank), bytes_of("0"));
      for (std::int64_t answered = 0; *here; std::this_thread::sleep_for(kPresencePoll)) {
        const auto asked = store->add(kQuestion, 0);
        if (asked == answered) continue;
        store->set(alive_mark(rank), bytes_of(std::to_string(asked)));
        answered = asked;
      }
    } catch (const std::exception&) {  // the store has gone, and no rank asks
    }
  }).detach();  // it may wait for a store that does not answer
  return {nullptr, [here](void*) { *here = false; }};
}

std::vector<std::string> missing_ranks(const Store& store,
                                       const std::string& meeting,
                                       const std::vector<int>& ranks,
                                       int rank) {
  struct Found {
    std::vector<std::string> silent{}, speaking{}, alive{};
    bool says_why() const { return alive.empty() || !silent.empty() || !speaking.empty(); }
  };
  const auto found = std::make_shared<Found>();
  const auto mark_of = [meeting](int of) { return fmt::format("failure/{}/{}", meeting, of); };
  const auto look = [=](std::int64_t question) {
    Found now;
    for (const int other : ranks) {
      if (store->check({mark_of(other)})) continue;
      const auto name = fmt::format("rank {}", other);
      if (store->check({announcement_of(other)})) {
        const auto said = store->get(announcement_of(other));
        now.speaking.push_back(
            fmt::format("{}, which failed: {}", name, std::string(said.begin(), said.end())));
      } else {
        const bool alive =
            store->check({alive_mark(other)}) && last_answer(*store, other) >= question;
        (alive ? now.alive : now.silent).push_back(name);
      }
    }
    return now;
  };
  const bool answered = within(3 * kMoment, [=] {
    const auto question = store->add(kQuestion, 1);
    store->set(mark_of(rank), bytes_of("1"));
    std::this_thread::sleep_for(kMoment);
    *found = look(question);
    // A rank that is alive, but missing, may be about to announce its failure.
    for (auto left = kMoment; !found->says_why() && left > kPoll; left -= kPoll) {
      std::this_thread::sleep_for(kPoll);
      *found = look(question);
    }
  });
  if (!answered) return {"rank 0"};
  auto missing = std::move(found->silent);
  missing.insert(missing.end(), found->speaking.begin(), found->speaking.end());
  return missing.empty() ? found->alive : missing;
}

}  // namespace ferry::models
