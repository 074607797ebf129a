// An engine of another rank: each call is a message to that rank, which makes it and answers. For
// the engines of --dp, whose loops all run on rank 0.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "models/distributed/mailbox.h"
#include "serve/engine_loop.h"

namespace ferry::serve {

// On rank 0.
class RemoteEngine : public EngineSteps {
 public:
  // `mail` is used by nobody else, and outlives this.
  RemoteEngine(const models::Mailbox& mail, int rank) : mail_(mail), rank_(rank) {}

  void add_request(const std::string& request_id,
                   const std::vector<std::int64_t>& prompt_token_ids,
                   const rollout::SamplingParams& params,
                   const ImageFiles& images) override;
  void abort(const std::string& request_id) override;
  void abort(const std::string& request_id, std::int64_t index) override;
  bool has_unfinished() const override { return has_unfinished_; }
  std::vector<rollout::RequestOutput> step() override;
  rollout::EngineStats stats() const override { return stats_; }
  void reset_prefix_cache() override;
  void begin_open_weights(const WeightSource& source) override;
  bool is_opening() const override { return is_opening_; }
  std::function<void()> open_weights(const WeightSource& source) override;
  void sleep(int level) override;
  void wake_up() override;
  void idle() override;
  bool is_lost() const override { return lost_.has_value(); }

  // The other rank's answer_calls() returns. Nothing happens if that rank has gone.
  void end();

 private:
  nlohmann::json ask(const nlohmann::json& call);

  const models::Mailbox& mail_;
  int rank_;
  nlohmann::json calls_ = nlohmann::json::array();  // that need no answer, since the last message
  bool has_unfinished_ = false;
  bool is_opening_ = false;
  rollout::EngineStats stats_{};
  std::optional<Error> lost_{};  // why the other rank answers no more
};

// On the other rank: makes the calls of rank 0 until its end(). Throws the error by which its
// engine is lost, after rank 0 has been told.
void answer_calls(EngineSteps& mine, const models::Mailbox& mail);

}  // namespace ferry::serve
