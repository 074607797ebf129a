#include "trainer/workers/worker_group.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

#include "distckpt/base/error.h"
#include "models/distributed/messages.h"
#include "trainer/workers/megatron_info.h"

namespace ferry::trainer {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Dispatch, takes_part, whole, dp_rank, is_collect)

namespace {

constexpr std::string_view kStop = "";

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

// name, a line's end, the batch.
std::string message(const std::string& name, const DataProto& data) {
  return fmt::format("{}\n{}", name, as_view(data.to_bytes()));
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
  const auto info = get_megatron_global_info(mesh);
  const auto at = get_megatron_rank_info(mesh);
  return {.dp_rank = at.dp_rank,
          .is_collect = at.tp_rank == 0 && at.cp_rank == 0 && at.pp_rank == info.pp_size - 1};
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
    registered.of_ranks.push_back(dispatch);
    for (int rank = 1; rank < world_.size(); ++rank) {
      registered.of_ranks.push_back(models::receive<Dispatch>(mail_, rank, "the part in " + name));
    }
  } else {
    models::send(mail_, dispatch, 0, "the part in " + name);
  }
  methods_.emplace(std::move(name), std::move(registered));
}

int WorkerGroup::num_parts(const std::string& name) const {
  int parts = 0;
  for (const auto& dispatch : at(name).of_ranks) {
    if (dispatch.takes_part && !dispatch.whole) parts = std::max(parts, dispatch.dp_rank + 1);
  }
  return parts;
}

WorkerGroup::Call WorkerGroup::start(const std::string& name, const DataProto& data) {
  const auto& of_ranks = at(name).of_ranks;
  Call call;
  call.method_ = name;
  std::vector<DataProto> parts;
  if (const auto number = num_parts(name); number > 0) {
    auto [padded, pad] = pad_dataproto_to_divisor(data, number);
    call.pad_ = pad;
    parts = padded.chunk(number);
  }
  const auto part_of = [&](const Dispatch& dispatch) -> const DataProto& {
    return dispatch.whole ? data : parts.at(static_cast<std::size_t>(dispatch.dp_rank));
  };
  in_call(name, [&] {
    for (int rank = 1; rank < world_.size(); ++rank) {
      const auto& dispatch = of_ranks.at(static_cast<std::size_t>(rank));
      if (dispatch.takes_part)
        mail_.send(message(name, part_of(dispatch)), rank, "the call of " + name);
    }
    if (of_ranks.front().takes_part) call.mine_ = at(name).method(part_of(of_ranks.front()));
  });
  return call;
}

DataProto WorkerGroup::finish(Call call) {
  const auto& of_ranks = at(call.method_).of_ranks;
  std::map<int, DataProto> answers;  // of the parts
  for (int rank = 0; rank < world_.size(); ++rank) {
    const auto& dispatch = of_ranks[static_cast<std::size_t>(rank)];
    if (!dispatch.takes_part) continue;
    auto answer = rank == 0 ? std::move(*call.mine_) : in_call(call.method_, [&] {
      return DataProto::from_bytes(as_bytes(mail_.receive(rank, "the answer to " + call.method_)));
    });
    if (dispatch.is_collect || dispatch.whole)
      answers.try_emplace(dispatch.dp_rank, std::move(answer));
  }
  std::vector<DataProto> parts;
  for (auto& [number, answer] : answers) parts.push_back(std::move(answer));
  require(!parts.empty(), ErrorKind::kBug, "{}: nobody answers", call.method_);
  const auto result = parts.size() == 1 ? std::move(parts.front()) : DataProto::concat(parts);
  return call.pad_ > 0 && result.size() > 0 ? unpad_dataproto(result, call.pad_) : result;
}

DataProto WorkerGroup::call(const std::string& name, const DataProto& data) {
  return finish(start(name, data));
}

void WorkerGroup::stop() {
  for (int rank = 1; rank < world_.size(); ++rank) mail_.send(kStop, rank, "the end");
}

void WorkerGroup::serve() {
  while (true) {
    const auto text = mail_.receive(0, "the next call");
    if (text == kStop) return;
    const auto end = text.find('\n');
    require(end != std::string::npos, ErrorKind::kBug, "a call without a name");
    const auto name = text.substr(0, end);
    in_call(name, [&] {
      const auto batch = DataProto::from_bytes(as_bytes(std::string_view(text).substr(end + 1)));
      mail_.send(as_view(at(name).method(batch).to_bytes()), 0, "the answer to " + name);
    });
  }
}

}  // namespace ferry::trainer
