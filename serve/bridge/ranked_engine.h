// The engines of a tensor parallel group as one: its first rank tells the others each of its calls,
// so that all get the same requests in the same order and take the same steps. Messages are between
// hosts, beside the collectives of the steps, one to each rank for a step and all calls before it.
//
// A call that fails on one rank alone leaves the ranks apart for good: that rank announces why
// (models/distributed/failure_board.h), and the engine is lost on all of them.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "models/distributed/mailbox.h"
#include "models/distributed/world.h"
#include "serve/engine_loop.h"

namespace ferry::serve {

// On the first rank.
class RankedEngine : public EngineSteps {
 public:
  // The ranks follow the first one. Engine, world and mailbox outlive this.
  RankedEngine(EngineSteps& mine,
               const models::World& world,
               const models::Mailbox& mail,
               int num_ranks)
      : mine_(mine), world_(world), mail_(mail), num_ranks_(num_ranks) {}

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
  void idle() override;
  bool is_lost() const override { return lost_.has_value(); }

  // The other ranks' follow() returns. Nothing happens if the engine is lost.
  void end();

 private:
  // Runs a part of a call that the other ranks do, too: if it throws, the engine is lost.
  void alike(const std::function<void()>& body);
  void tell();
  std::vector<int> others() const;
  // Tells the other ranks, does the same here, and waits until they have done it. Throws the first
  // error that one of them met.
  void do_together(const std::function<void()>& mine);

  EngineSteps& mine_;
  const models::World& world_;  // this rank's engine begins with it
  const models::Mailbox& mail_;
  int num_ranks_;
  nlohmann::json calls_ = nlohmann::json::array();  // since the last message
  std::optional<Error> lost_{};                     // why the engine is
};

// On the other ranks: makes the calls of the first one until its end(). It is told of errors of
// weights, whose files each rank reads by itself; an Error of a request it meets as well. Throws
// any other one, which is announced.
void follow(EngineSteps& mine,
            const models::World& world,
            const models::Mailbox& mail,
            int first_rank);

}  // namespace ferry::serve
