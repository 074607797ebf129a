#include "serve/bridge/ranked_engine.h"

#include <utility>

#include "distckpt/base/cbor.h"
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

std::function<void()> RankedEngine::open_weights(const WeightSource& source) {
  calls_.push_back(open_weights_call(source));
  tell();
  return [this, load = mine_.open_weights(source)] {
    calls_.push_back({"load_weights"});
    tell();
    load();
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
      try {
        make_call(called, one);
      } catch (const Error&) {  // NOLINT(bugprone-empty-catch): the first rank has it, too
      }
    }
  }
}

}  // namespace ferry::serve
