// The engines of a tensor parallel group as one: its first rank tells the others each of its calls,
// so that all get the same requests in the same order and take the same steps. Messages are between
// hosts, beside the collectives of the steps, one to each rank for a step and all calls before it.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "models/distributed/mailbox.h"
#include "serve/engine_loop.h"

namespace ferry::serve {

// On the first rank.
class RankedEngine : public EngineSteps {
 public:
  // The ranks follow the first one. Engine and mailbox outlive this.
  RankedEngine(EngineSteps& mine, const models::Mailbox& mail, int first_rank, int num_ranks)
      : mine_(mine), mail_(mail), first_rank_(first_rank), num_ranks_(num_ranks) {}

  void add_request(const std::string& request_id,
                   const std::vector<std::int64_t>& prompt_token_ids,
                   const rollout::SamplingParams& params,
                   const ImageFiles& images) override;
  void abort(const std::string& request_id) override;
  void abort(const std::string& request_id, std::int64_t index) override;
  bool has_unfinished() const override { return mine_.has_unfinished(); }
  std::vector<rollout::RequestOutput> step() override;
  rollout::EngineStats stats() const override { return mine_.stats(); }
  void reset_prefix_cache() override;
  void begin_open_weights(const WeightSource& source) override;
  bool is_opening() const override { return mine_.is_opening(); }
  std::function<void()> open_weights(const WeightSource& source) override;
  void sleep(int level) override;
  void wake_up() override;
  void idle() override { tell(); }

  // The other ranks' follow() returns.
  void end();

 private:
  void tell();
  // Tells the other ranks, does the same here, and waits until they have done it. Throws the first
  // error that one of them met.
  void do_together(const std::function<void()>& mine);

  EngineSteps& mine_;
  const models::Mailbox& mail_;
  int first_rank_;
  int num_ranks_;
  nlohmann::json calls_ = nlohmann::json::array();  // since the last message
};

// On the other ranks: makes the calls of the first one until its end(). It is told of errors of
// weights, whose files each rank reads by itself. That of another call it meets as well.
void follow(EngineSteps& mine, const models::Mailbox& mail, int first_rank);

}  // namespace ferry::serve
