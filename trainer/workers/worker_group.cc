#include "trainer/workers/worker_group.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <numeric>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/messages.h"

namespace ferry::trainer {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Dispatch, takes_part, whole, dp_rank, is_collect)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CallRoute, takes_part, part, rows_from, rows_to, answers)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RowPiece, answer, columns, rows, group, places)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RowParcel, from, to, pieces)

namespace {

constexpr std::string_view kStop = "";

// A call, as a rank is told of it.
// NOLINTNEXTLINE(bugprone-exception-escape): an empty json throws nothing
struct CallMessage {
  std::string name{};
  nlohmann::json meta_info{};
  CallRoute route{};
  bool has_rows = false;
  std::int64_t answer = 0;           // its number
  std::vector<std::int64_t> kept{};  // answers that somebody still asks for
  std::vector<RowParcel> parcels{};  // from this rank, and for it
  RolloutBatch rows{};               // from rank 0, which is route.rows_from
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(
    CallMessage, name, meta_info, route, has_rows, answer, kept, parcels, rows)

// Runs a part of a call: an Error that leaves it says of which.
template <typename Body>
auto in_call(const std::string& name, Body&& body) {
  return with_context([&] { return "in " + name; }, std::forward<Body>(body));
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// NOLINTNEXTLINE(bugprone-exception-escape): an empty json throws nothing
struct AnswerMessage {
  nlohmann::json meta_info{};
  std::vector<std::string> kept{};  // its columns that stay where they are
  double seconds = 0;               // that its method took
  RolloutBatch rows{};
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AnswerMessage, meta_info, kept, seconds, rows)

std::int64_t size_of(std::string_view bytes) {
  return static_cast<std::int64_t>(bytes.size());
}

}  // namespace

Dispatch one_to_all(const models::World& world) {
  return {.whole = true, .is_collect = world.rank() == 0};
}

Dispatch rank_zero(const models::World& world) {
  return {.takes_part = world.rank() == 0, .whole = true, .is_collect = true};
}

Dispatch dp_compute_proto(const models::World& world) {
  return {.dp_rank = world.rank(), .is_collect = true};
}

Dispatch megatron_compute_proto(const models::ParallelState& mesh) {
  const auto& at = mesh.coordinates();
  return {.dp_rank = at.dp, .is_collect = at.tp == 0 && at.cp == 0 && mesh.is_last_stage()};
}

std::vector<CallRoute> route_call(std::span<const Dispatch> of_ranks) {
  std::vector<CallRoute> routes(of_ranks.size());
  std::map<int, int> leaders, answering;  // of the parts
  for (std::size_t i = 0; i < of_ranks.size(); ++i) {
    const auto& dispatch = of_ranks[i];
    if (!dispatch.takes_part) continue;
    const auto rank = static_cast<int>(i);
    const auto part = dispatch.whole ? 0 : dispatch.dp_rank;
    const auto leader = rank == 0 ? 0 : leaders.try_emplace(part, rank).first->second;
    const bool answers =
        (dispatch.whole || dispatch.is_collect) && answering.try_emplace(part, rank).second;
    routes[i] = {.takes_part = true,
                 .part = part,
                 .rows_from = leader == rank ? 0 : leader,
                 .answers = answers};
    if (leader != rank) routes[static_cast<std::size_t>(leader)].rows_to.push_back(rank);
  }
  return routes;
}

WorkerGroup::WorkerGroup(models::World& world, std::chrono::milliseconds worker_timeout)
    : world_(world),
      mail_(world,
            "workers",
            {.limit = worker_timeout,
             .hint = "see where its threads are; what takes longer needs a larger "
                     "trainer.worker_timeout"}) {}

const WorkerGroup::Registered& WorkerGroup::at(const std::string& name) const {
  const auto found = methods_.find(name);
  require(found != methods_.end(), ErrorKind::kBug, "workers have no method {}", name);
  return found->second;
}

void WorkerGroup::add(std::string name, const Dispatch& dispatch, Method method) {
  require(!methods_.contains(name), ErrorKind::kBug, "workers have two methods {}", name);
  Registered registered{.method = std::move(method)};
  if (world_.rank() == 0) {
    std::vector<Dispatch> of_ranks{dispatch};
    for (const auto& bytes : mail_.exchange({}, others(), "the part in " + name))
      of_ranks.push_back(from_cbor<Dispatch>(bytes));
    registered.routes = route_call(of_ranks);
    for (const auto& one : of_ranks)
      if (one.takes_part && !one.whole)
        registered.num_parts = std::max(registered.num_parts, one.dp_rank + 1);
  } else {
    models::send(mail_, dispatch, 0, "the part in " + name);
  }
  methods_.emplace(std::move(name), std::move(registered));
}

int WorkerGroup::num_parts(const std::string& name) const {
  return at(name).num_parts;
}

std::vector<int> WorkerGroup::others() const {
  std::vector<int> ranks(static_cast<std::size_t>(world_.size() - 1));
  std::iota(ranks.begin(), ranks.end(), 1);
  return ranks;
}

void WorkerGroup::exchange_rows(std::span<const RowParcel> parcels,
                                RolloutBatch& rows,
                                const std::string& name) {
  std::vector<models::Mailbox::Letter> letters;
  std::vector<int> from;
  std::vector<RowParcel> mine, arriving;
  std::vector<std::vector<RolloutBatch>> found;
  for (const auto& parcel : parcels) {
    if (parcel.from != world_.rank()) {
      from.push_back(parcel.from);
      arriving.push_back(parcel);
    } else if (parcel.to == world_.rank()) {
      mine.push_back(parcel);
      found.push_back(kept_.find(parcel));
    } else {
      letters.push_back({.to = parcel.to, .bytes = to_cbor(kept_.find(parcel))});
      bytes_sent_ += size_of(letters.back().bytes);
    }
  }
  for (const auto& bytes : mail_.exchange(letters, from, "the rows of " + name)) {
    bytes_received_ += size_of(bytes);
    found.push_back(from_cbor<std::vector<RolloutBatch>>(bytes));
  }
  std::ranges::move(arriving, std::back_inserter(mine));
  add_columns(rows, mine, found);
}

std::vector<std::int64_t> WorkerGroup::leased() {
  std::erase_if(leases_, [](const auto& one) { return one.second.expired(); });
  std::vector<std::int64_t> answers;
  for (const auto& [answer, lease] : leases_) answers.push_back(answer);
  return answers;
}

WorkerGroup::Call WorkerGroup::start(const std::string& name,
                                     const WorkerData& data,
                                     RowsOfRanks rows,
                                     bool own_rows) {
  const auto& [routes, parts, method] = at(name);
  const auto begin = Clock::now();
  const auto moved = bytes_sent_ + bytes_received_;
  Call call;
  call.method_ = name;
  call.answer_ = ++last_answer_;
  call.lease_ = std::make_shared<char>();
  leases_.emplace(call.answer_, call.lease_);
  call.own_rows_ = own_rows;
  const bool has_rows = data.batch.size() > 0;
  const bool shares_out = rows.empty() && parts > 0 && (has_rows || !own_rows);
  call.rows_ = shares_out ? even_rows(data.batch.size(), parts) : std::move(rows);
  const auto rows_of = [&](const CallRoute& route) {
    return call.rows_.empty() ? rows_in_order(data.batch.size())
                              : call.rows_.at(static_cast<std::size_t>(route.part));
  };
  std::map<int, RolloutBatch::Rows> receivers;
  for (int rank = 0; rank < world_.size() && has_rows; ++rank) {
    const auto& route = routes[static_cast<std::size_t>(rank)];
    if (route.takes_part && route.rows_from == 0) receivers.emplace(rank, rows_of(route));
  }
  std::vector<std::vector<RowParcel>> of_ranks(routes.size());
  for (const auto& parcel : plan_parcels(data.batch, receivers)) {
    of_ranks[static_cast<std::size_t>(parcel.from)].push_back(parcel);
    if (parcel.to != parcel.from) of_ranks[static_cast<std::size_t>(parcel.to)].push_back(parcel);
  }
  const auto kept = leased();
  in_call(name, [&] {
    std::vector<models::Mailbox::Letter> letters;
    for (int rank = 1; rank < world_.size(); ++rank) {
      const auto& route = routes[static_cast<std::size_t>(rank)];
      auto& parcels = of_ranks[static_cast<std::size_t>(rank)];
      if (!route.takes_part && parcels.empty()) continue;
      RolloutBatch known;
      if (receivers.contains(rank)) known = data.batch.select(receivers.at(rank));
      letters.push_back(
          {.to = rank,
           .bytes = to_cbor(CallMessage{name, data.meta_info, route, has_rows, call.answer_, kept,
                                        std::move(parcels), std::move(known)})});
      bytes_sent_ += size_of(letters.back().bytes);
    }
    (void)mail_.exchange(letters, {}, "the call of " + name);
    kept_.keep_only(kept);
    WorkerData mine{.meta_info = data.meta_info};
    if (receivers.contains(0)) {
      mine.batch = data.batch.select(receivers.at(0));
      mine.batch.kept.clear();
    }
    exchange_rows(of_ranks.front(), mine.batch, name);
    call.cost_.bytes = bytes_sent_ + bytes_received_ - moved;
    if (!routes.front().takes_part) return;
    const auto method_begin = Clock::now();
    call.mine_ = method(mine);
    call.slowest_ = seconds_since(method_begin);
  });
  call.cost_.seconds = seconds_since(begin);
  return call;
}

WorkerData WorkerGroup::finish(Call call) {
  const auto& name = call.method_;
  const auto& routes = at(name).routes;
  const auto begin = Clock::now();
  std::map<int, WorkerData> answers;  // of the parts
  const auto add = [&](int rank, WorkerData answer, const std::vector<std::string>& kept) {
    RolloutBatch::Kept stays{.leases = {call.lease_}};
    for (const auto& column : kept) stays.columns.emplace(column, column);
    for (std::int64_t row = 0; row < answer.batch.size(); ++row)
      stays.places.push_back({.answer = call.answer_, .rank = rank, .row = row});
    if (!kept.empty()) answer.batch.kept.push_back(std::move(stays));
    answers.emplace(routes[static_cast<std::size_t>(rank)].part, std::move(answer));
  };
  if (routes.front().answers) {
    const auto kept = kept_.keep(call.answer_, call.mine_->batch);
    add(0, std::move(*call.mine_), kept);
  }
  std::vector<int> asked;
  for (const auto rank : others())
    if (routes[static_cast<std::size_t>(rank)].takes_part) asked.push_back(rank);
  const auto messages =
      in_call(name, [&] { return mail_.exchange({}, asked, "the answer to " + name); });
  for (std::size_t i = 0; i < asked.size(); ++i) {
    call.cost_.bytes += size_of(messages[i]);
    auto told = from_cbor<AnswerMessage>(messages[i]);
    call.slowest_ = std::max(call.slowest_, told.seconds);
    if (!routes[static_cast<std::size_t>(asked[i])].answers) continue;
    WorkerData answer;
    answer.batch = std::move(told.rows);
    answer.meta_info = std::move(told.meta_info);
    add(asked[i], std::move(answer), told.kept);
  }
  call.cost_.seconds += seconds_since(begin) - call.slowest_;
  auto& cost = costs_[name];
  cost.seconds += std::max(call.cost_.seconds, 0.0);
  cost.work += call.slowest_;
  cost.bytes += call.cost_.bytes;
  require(!answers.empty(), ErrorKind::kBug, "{}: nobody answers", name);
  WorkerData result{.meta_info = std::move(answers.begin()->second.meta_info)};
  std::vector<RolloutBatch> parts;
  for (auto& [part, answer] : answers) parts.push_back(std::move(answer.batch));
  result.batch = parts.size() == 1 ? std::move(parts.front()) : RolloutBatch::concat(parts);
  if (!call.own_rows_ && !call.rows_.empty() && result.batch.size() > 0)
    result.batch = in_order(result.batch, call.rows_);
  return result;
}

WorkerData WorkerGroup::call(const std::string& name, const WorkerData& data, RowsOfRanks rows) {
  return finish(start(name, data, std::move(rows)));
}

void WorkerGroup::stop() {
  std::vector<models::Mailbox::Letter> letters;
  for (const auto rank : others()) letters.push_back({.to = rank, .bytes = std::string(kStop)});
  (void)mail_.exchange(letters, {}, "the end");
}

void WorkerGroup::serve() {
  while (true) {
    const auto text = mail_.receive(0, "the next call");
    if (text == kStop) return;
    auto call = from_cbor<CallMessage>(text);
    const auto& name = call.name;
    const auto& route = call.route;
    in_call(name, [&] {
      kept_.keep_only(call.kept);
      exchange_rows(call.parcels, call.rows, name);
      if (!route.takes_part) return;
      if (call.has_rows && route.rows_from != 0)
        call.rows = models::receive<RolloutBatch>(mail_, route.rows_from, "the rows of " + name);
      if (call.has_rows && !route.rows_to.empty()) {
        const auto bytes = to_cbor(call.rows);
        for (const auto to : route.rows_to) {
          mail_.send(bytes, to, "the rows of " + name);
          bytes_sent_ += size_of(bytes);
        }
      }
      const auto begin = Clock::now();
      WorkerData given{.meta_info = call.meta_info};
      given.batch = std::move(call.rows);
      auto answer = at(name).method(given);
      AnswerMessage told{.seconds = seconds_since(begin)};
      if (route.answers) {
        told.kept = kept_.keep(call.answer, answer.batch);
        told.meta_info = std::move(answer.meta_info);
        told.rows = std::move(answer.batch);
      }
      const auto bytes = to_cbor(told);
      mail_.send(bytes, 0, "the answer to " + name);
      bytes_sent_ += size_of(bytes);
    });
  }
}

}  // namespace ferry::trainer
