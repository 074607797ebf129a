#include "trainer/workers/carried_groups.h"

#include <algorithm>
#include <span>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::trainer {
namespace {

// A session of one turn as it was when it had so many tokens.
void cut_to(Session& session, std::size_t tokens) {
  if (session.response.size() == tokens) return;
  session.response.resize(tokens);
  session.response_mask.resize(tokens);
  session.global_steps.resize(tokens);
  session.routed_experts.clear();  // it goes on with those of all its tokens
  session.assistant_turns = 0;
  session.is_over = false;
}

}  // namespace

CarriedGroups::CarriedGroups(std::vector<Session>& sessions,
                             std::size_t n,
                             std::size_t wanted,
                             std::set<std::size_t> old)
    : sessions_(sessions), n_(n), wanted_(wanted), old_(std::move(old)) {
  const auto num_groups = sessions_.size() / n_;
  require(old_.size() <= wanted_ && wanted_ <= num_groups, ErrorKind::kBug,
          "a partial rollout has {} groups, {} of them to finish, to return {}", num_groups,
          old_.size(), wanted_);
}

bool CarriedGroups::is_over(std::size_t group) const {
  return std::ranges::all_of(std::span(sessions_).subspan(group * n_, n_), &Session::is_over);
}

std::set<std::size_t> CarriedGroups::chosen() const {
  auto groups = old_;
  for (std::size_t group = 0; groups.size() < wanted_ && group < sessions_.size() / n_; ++group)
    if (is_over(group)) groups.insert(group);
  return groups;
}

bool CarriedGroups::are_finished() const {
  return std::ranges::all_of(old_, [&](auto group) { return is_over(group); }) &&
         chosen().size() == wanted_;
}

std::size_t CarriedGroups::num_over() const {
  const auto groups = chosen();
  return static_cast<std::size_t>(
      std::ranges::count_if(groups, [&](auto group) { return is_over(group); }));
}

void CarriedGroups::keep_time(std::int64_t places, std::function<void(std::size_t)> is_over) {
  places_ = places;
  told_of_ = std::move(is_over);
  for (const auto& session : sessions_) {
    begun_.push_back(session.response.size());
    told_.push_back(session.is_over);
  }
}

TokenClock CarriedGroups::clock() const {
  std::vector<TokenClock::Session> all;
  for (std::size_t i = 0; i < sessions_.size(); ++i)
    all.push_back({.tokens = static_cast<std::int64_t>(sessions_[i].response.size() - begun_[i]),
                   .is_over = sessions_[i].is_over});
  return {all, places_};
}

// Nothing if it is not known yet.
std::optional<std::int64_t> CarriedGroups::end(const TokenClock& clock) const {
  std::vector<std::int64_t> ends;
  std::int64_t last = 0;
  for (std::size_t group = 0; group < sessions_.size() / n_; ++group) {
    auto& end = ends.emplace_back(0);
    for (auto i = group * n_; i < (group + 1) * n_; ++i) end = std::max(end, clock.end(i));
    if (old_.contains(group)) last = std::max(last, end);
  }
  if (wanted_ > 0) {
    const auto nth = ends.begin() + static_cast<std::ptrdiff_t>(wanted_ - 1);
    std::nth_element(ends.begin(), nth, ends.end());
    last = std::max(last, *nth);
  }
  if (last == TokenClock::kNever || last > clock.known_until()) return std::nullopt;
  return last;
}

void CarriedGroups::tell(const TokenClock& clock, std::int64_t until) {
  for (std::size_t i = 0; i < sessions_.size(); ++i) {
    if (told_[i] || clock.end(i) > until) continue;
    told_[i] = true;
    told_of_(i);
  }
}

bool CarriedGroups::know_their_end() {
  const auto num_over =
      static_cast<std::size_t>(std::ranges::count_if(sessions_, &Session::is_over));
  const bool more = std::exchange(num_seen_, num_over) != num_over;
  if (!more && !are_finished()) return false;
  const auto now = clock();
  if (end(now)) return true;
  tell(now, std::min(now.known_until(), TokenClock::kNever - 1));
  return false;
}

void CarriedGroups::cut() {
  const auto now = clock();
  const auto time = end(now);
  require(time.has_value(), ErrorKind::kBug, "a partial rollout ended before its groups");
  tell(now, *time);
  for (std::size_t i = 0; i < sessions_.size(); ++i)
    if (now.end(i) > *time)
      cut_to(sessions_[i], begun_[i] + static_cast<std::size_t>(now.tokens_at(i, *time)));
}

std::vector<Session> CarriedGroups::take() {
  const auto groups = chosen();
  std::vector<Session> finished, others;
  for (std::size_t i = 0; i < sessions_.size(); ++i) {
    auto& to = groups.contains(i / n_) ? finished : others;
    to.push_back(std::move(sessions_[i]));
  }
  sessions_ = std::move(others);
  return finished;
}

}  // namespace ferry::trainer
