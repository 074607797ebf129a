#include "serve/bridge/ranked_engine.h"

#include <exception>
#include <optional>
#include <utility>

#include "distckpt/base/cbor.h"
#include "distckpt/base/foreign_error.h"
#include "serve/bridge/engine_calls.h"

namespace ferry::serve {

using nlohmann::json;
using rollout::SamplingParams;

void RankedEngine::tell() {
  const auto bytes = to_cbor(std::exchange(calls_, json::array()));
  for (int rank = first_rank_ + 1; rank < first_rank_ + num_ranks_; ++rank)
    mail_.send(bytes, rank, "the engine's next calls");
}

void RankedEngine::end() {
  calls_.push_back({"end"});
  tell();
}

void RankedEngine::add_request(const std::string& request_id,
                               const std::vector<std::int64_t>& prompt_token_ids,
                               const SamplingParams& params,
                               const ImageFiles& images) {
  calls_.push_back(add_request_call(request_id, prompt_token_ids, params, images));
  mine_.add_request(request_id, prompt_token_ids, params, images);
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
  calls_.push_back({"step"});
  tell();
  return mine_.step();
}

void RankedEngine::reset_prefix_cache() {
  calls_.push_back({"reset_prefix_cache"});
  mine_.reset_prefix_cache();
}

void RankedEngine::do_together(const std::function<void()>& mine) {
  tell();
  std::optional<Error> failed;
  try {
    mine();
  } catch (const std::exception& error) {
    failed = as_error(error);
  }
  for (int rank = first_rank_ + 1; rank < first_rank_ + num_ranks_; ++rank) {
    const auto error = from_cbor<json>(mail_.receive(rank, "the end of a call"));
    if (!error.is_null() && !failed) failed = read_error(error);
  }
  if (failed) throw Error(*failed);
}

void RankedEngine::begin_open_weights(const WeightSource& source) {
  calls_.push_back(begin_open_weights_call(source));
  tell();
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
  tell();
  mine_.sleep(level);
}

void RankedEngine::wake_up() {
  calls_.push_back({"wake_up"});
  tell();
  mine_.wake_up();
}

void follow(EngineSteps& mine, const models::Mailbox& mail, int first_rank) {
  CalledEngine called{.engine = mine};
  while (true) {
    for (const auto& one : from_cbor<json>(mail.receive(first_rank, "the engine's next calls"))) {
      if (one.at(0) == "end") return;
      const bool is_of_weights = one.at(0) == "open_weights" || one.at(0) == "load_weights";
      json failed;
      try {
        make_call(called, one);
      } catch (const std::exception& error) {
        if (!is_of_weights && dynamic_cast<const Error*>(&error) == nullptr) throw;
        failed = error_json(as_error(error));
      }
      if (is_of_weights) mail.send(to_cbor(failed), first_rank, "the end of a call");
    }
  }
}

}  // namespace ferry::serve
