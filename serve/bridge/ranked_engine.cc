#include "serve/bridge/ranked_engine.h"

#include <exception>
#include <numeric>
#include <string_view>
#include <utility>

#include "distckpt/base/foreign_error.h"
#include "models/distributed/failure_board.h"
#include "models/distributed/messages.h"
#include "serve/bridge/engine_calls.h"

namespace ferry::serve {

using nlohmann::json;
using rollout::SamplingParams;

namespace {

// True if an Error of the call leaves the ranks alike. Requests are refused by all of them, and the
// first rank hears of the others' weights.
bool leaves_ranks_alike(std::string_view call) {
  return call == "add_request" || call == "begin_open_weights" || call == "open_weights" ||
         call == "load_weights";
}

}  // namespace

std::vector<int> RankedEngine::others() const {
  std::vector<int> ranks(static_cast<std::size_t>(num_ranks_ - 1));
  std::iota(ranks.begin(), ranks.end(), world_.rank() + 1);
  return ranks;
}

void RankedEngine::alike(const std::function<void()>& body) {
  if (lost_) throw Error(*lost_);
  try {
    body();
  } catch (const std::exception& error) {
    lost_ = as_error(error);
    models::announce_failure(world_, *lost_);
    throw Error(*lost_);
  }
}

void RankedEngine::tell() {
  const auto calls = std::exchange(calls_, json::array());
  for (const int rank : others()) models::send(mail_, calls, rank, "the engine's next calls");
}

void RankedEngine::end() {
  if (lost_) return;
  calls_.push_back({"end"});
  tell();
}

void RankedEngine::add_request(const std::string& request_id,
                               const std::vector<std::int64_t>& prompt_token_ids,
                               const SamplingParams& params,
                               const ImageFiles& images) {
  calls_.push_back(add_request_call(request_id, prompt_token_ids, params, images));
  std::optional<Error> refused;
  alike([&] {
    try {
      mine_.add_request(request_id, prompt_token_ids, params, images);
    } catch (const Error& error) {
      refused = error;
    }
  });
  if (refused) throw Error(*refused);
}

void RankedEngine::abort(const std::string& request_id) {
  calls_.push_back(abort_call(request_id));
  mine_.abort(request_id);
}

void RankedEngine::abort(const std::string& request_id, std::int64_t index) {
  calls_.push_back(abort_call(request_id, index));
  mine_.abort(request_id, index);
}

std::vector<rollout::RequestOutput> RankedEngine::step() {
  std::vector<rollout::RequestOutput> outputs;
  alike([&] {
    calls_.push_back({"step"});
    tell();
    outputs = mine_.step();
  });
  return outputs;
}

void RankedEngine::reset_prefix_cache() {
  calls_.push_back({"reset_prefix_cache"});
  alike([&] { mine_.reset_prefix_cache(); });
}

void RankedEngine::do_together(const std::function<void()>& mine) {
  std::optional<Error> failed;
  alike([&] {
    tell();
    try {
      mine();
    } catch (const std::exception& error) {
      failed = as_error(error);
    }
    for (const int rank : others()) {
      const auto error = models::receive<json>(mail_, rank, "the end of a call");
      if (!error.is_null() && !failed) failed = read_error(error);
    }
  });
  if (failed) throw Error(*failed);
}

void RankedEngine::begin_open_weights(const WeightSource& source) {
  calls_.push_back(begin_open_weights_call(source));
  alike([&] { tell(); });
  mine_.begin_open_weights(source);
}

std::function<void()> RankedEngine::open_weights(const WeightSource& source) {
  std::function<void()> load;
  calls_.push_back(open_weights_call(source));
  do_together([&] { load = mine_.open_weights(source); });
  return [this, load] {
    calls_.push_back({"load_weights"});
    do_together(load);
  };
}

void RankedEngine::sleep(int level) {
  calls_.push_back({"sleep", level});
  alike([&] {
    tell();
    mine_.sleep(level);
  });
}

void RankedEngine::wake_up() {
  calls_.push_back({"wake_up"});
  alike([&] {
    tell();
    mine_.wake_up();
  });
}

void RankedEngine::idle() {
  alike([&] { tell(); });
}

void follow(EngineSteps& mine,
            const models::World& world,
            const models::Mailbox& mail,
            int first_rank) {
  CalledEngine called{.engine = mine};
  const auto attempt = [&](const json& call, bool is_of_weights) {
    try {
      make_call(called, call);
    } catch (const std::exception& error) {
      const bool is_own = dynamic_cast<const Error*>(&error) != nullptr;
      if (is_of_weights || (is_own && leaves_ranks_alike(call.at(0).get_ref<const std::string&>())))
        return std::optional(as_error(error));
      models::announce_failure(world, as_error(error));
      throw;
    }
    return std::optional<Error>();
  };
  while (true) {
    for (const auto& call : models::receive<json>(mail, first_rank, "the engine's next calls")) {
      if (call.at(0) == "end") return;
      const bool is_of_weights = call.at(0) == "open_weights" || call.at(0) == "load_weights";
      const auto failed = attempt(call, is_of_weights);
      if (is_of_weights)
        models::send(mail, failed ? error_json(*failed) : json(), first_rank, "the end of a call");
    }
  }
}

}  // namespace ferry::serve
