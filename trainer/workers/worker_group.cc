#include "trainer/workers/worker_group.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/messages.h"

namespace ferry::trainer {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Dispatch, takes_part, whole, dp_rank, is_collect)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CallRoute, takes_part, part, rows_from, rows_to, answers)

namespace {

constexpr std::string_view kStop = "";

// A call without its rows, as a rank is told of it.
struct CallHead {
  std::string name{};
  nlohmann::json meta_info{};
  CallRoute route{};
  bool has_rows = false;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(CallHead, name, meta_info, route, has_rows)

std::string_view as_view(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::span<const std::byte> as_bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

// Runs a part of a call: an Error that leaves it says of which.
template <typename Body>
auto in_call(const std::string& name, Body&& body) {
  return with_context([&] { return "in " + name; }, std::forward<Body>(body));
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// An answer without its rows; `seconds`: that its method took.
struct AnswerHead {
  nlohmann::json meta_info{};
  double seconds = 0;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(AnswerHead, meta_info, seconds)

struct Answer {
  WorkerData data{};
  double seconds = 0;
};

// Size of the head, the head in CBOR, the rows.
std::string answer_bytes(const WorkerData& answer, double seconds) {
  const auto head = to_cbor(AnswerHead{answer.meta_info, seconds});
  const std::uint64_t size = head.size();
  std::string bytes(reinterpret_cast<const char*>(&size), sizeof(size));
  return bytes.append(head).append(as_view(answer.batch.to_bytes()));
}

Answer answer_of(std::string_view bytes) {
  std::uint64_t size = 0;
  require(bytes.size() >= sizeof(size), ErrorKind::kBug, "an answer of {} bytes", bytes.size());
  std::memcpy(&size, bytes.data(), sizeof(size));
  const auto rest = bytes.substr(sizeof(size));
  auto head = from_cbor<AnswerHead>(rest.substr(0, size));
  Answer answer;
  answer.data.batch = RolloutBatch::from_bytes(as_bytes(rest.substr(size)));
  answer.data.meta_info = std::move(head.meta_info);
  answer.seconds = head.seconds;
  return answer;
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
    for (int rank = 1; rank < world_.size(); ++rank) {
      of_ranks.push_back(models::receive<Dispatch>(mail_, rank, "the part in " + name));
    }
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

void WorkerGroup::send_rows(std::string_view bytes, int to, const std::string& name) {
  bytes_sent_ += static_cast<std::int64_t>(bytes.size());
  mail_.send(bytes, to, "the rows of " + name);
}

WorkerGroup::Call WorkerGroup::start(const std::string& name,
                                     const WorkerData& data,
                                     RowsOfRanks rows) {
  const auto& [routes, parts, method] = at(name);
  Call call;
  call.method_ = name;
  call.rows_ = rows.empty() && parts > 0 ? even_rows(data.batch.size(), parts) : std::move(rows);
  const auto part_of = [&](const CallRoute& route) {
    return call.rows_.empty()
               ? data.batch
               : data.batch.select(call.rows_.at(static_cast<std::size_t>(route.part)));
  };
  const bool has_rows = data.batch.size() > 0;
  const auto begin = Clock::now();
  in_call(name, [&] {
    for (int rank = 1; rank < world_.size(); ++rank) {
      const auto& route = routes[static_cast<std::size_t>(rank)];
      if (!route.takes_part) continue;
      const auto head = to_cbor(CallHead{name, data.meta_info, route, has_rows});
      call.cost_.bytes += static_cast<std::int64_t>(head.size());
      mail_.send(head, rank, "the call of " + name);
    }
    for (int rank = 1; rank < world_.size() && has_rows; ++rank) {
      const auto& route = routes[static_cast<std::size_t>(rank)];
      if (!route.takes_part || route.rows_from != 0) continue;
      const auto part = part_of(route).to_bytes();
      call.cost_.bytes += static_cast<std::int64_t>(part.size());
      send_rows(as_view(part), rank, name);
    }
    const auto& mine = routes.front();
    if (!mine.takes_part) return;
    const auto method_begin = Clock::now();
    call.mine_ = method({.batch = part_of(mine), .meta_info = data.meta_info});
    call.slowest_ = seconds_since(method_begin);
  });
  call.cost_.seconds = seconds_since(begin);
  return call;
}

WorkerData WorkerGroup::finish(Call call) {
  const auto& routes = at(call.method_).routes;
  const auto begin = Clock::now();
  std::map<int, WorkerData> answers;  // of the parts
  for (int rank = 0; rank < world_.size(); ++rank) {
    const auto& route = routes[static_cast<std::size_t>(rank)];
    if (!route.takes_part) continue;
    auto answer = rank == 0 ? std::move(*call.mine_) : in_call(call.method_, [&] {
      const auto bytes = mail_.receive(rank, "the answer to " + call.method_);
      call.cost_.bytes += static_cast<std::int64_t>(bytes.size());
      auto [data, seconds] = answer_of(bytes);
      call.slowest_ = std::max(call.slowest_, seconds);
      return std::move(data);
    });
    if (route.answers) answers.emplace(route.part, std::move(answer));
  }
  call.cost_.seconds += seconds_since(begin) - call.slowest_;
  auto& cost = costs_[call.method_];
  cost.seconds += std::max(call.cost_.seconds, 0.0);
  cost.bytes += call.cost_.bytes;
  require(!answers.empty(), ErrorKind::kBug, "{}: nobody answers", call.method_);
  WorkerData result{.meta_info = std::move(answers.begin()->second.meta_info)};
  std::vector<RolloutBatch> parts;
  for (auto& [part, answer] : answers) parts.push_back(std::move(answer.batch));
  result.batch = parts.size() == 1 ? std::move(parts.front()) : RolloutBatch::concat(parts);
  if (!call.rows_.empty() && result.batch.size() > 0)
    result.batch = in_order(result.batch, call.rows_);
  return result;
}

WorkerData WorkerGroup::call(const std::string& name, const WorkerData& data, RowsOfRanks rows) {
  return finish(start(name, data, std::move(rows)));
}

void WorkerGroup::stop() {
  for (int rank = 1; rank < world_.size(); ++rank) mail_.send(kStop, rank, "the end");
}

void WorkerGroup::serve() {
  while (true) {
    const auto text = mail_.receive(0, "the next call");
    if (text == kStop) return;
    const auto told = from_cbor<CallHead>(text);
    const auto& name = told.name;
    const auto& route = told.route;
    in_call(name, [&] {
      WorkerData given{.meta_info = told.meta_info};
      if (told.has_rows) {
        const auto bytes = mail_.receive(route.rows_from, "the rows of " + name);
        for (const auto to : route.rows_to) send_rows(bytes, to, name);
        given.batch = RolloutBatch::from_bytes(as_bytes(bytes));
      }
      const auto begin = Clock::now();
      const auto answer = at(name).method(given);
      const auto bytes = answer_bytes(route.answers ? answer : WorkerData(), seconds_since(begin));
      bytes_sent_ += static_cast<std::int64_t>(bytes.size());
      mail_.send(bytes, 0, "the answer to " + name);
    });
  }
}

}  // namespace ferry::trainer
