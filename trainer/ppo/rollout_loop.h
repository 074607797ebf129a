// Prompts in, answered and scored batches out, on rank 0: draws prompts, asks the rollout, has the
// responses rewarded, and leaves out groups that teach nothing (DAPO's dynamic sampling).
//
// In asynchronous runs (async_training, trainer.one_step_off) the rollout answers prompts of later
// steps on its own ranks while one learns, as AsyncSchedule says. Before a checkpoint nothing is
// answered ahead, so that a run that goes on from it is where the other one was. With
// partial_rollout more prompts are under way than a step takes; it learns from those that are
// answered first, and the others go on when the rollout has the next weights.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "trainer/config/ppo_config.h"
#include "trainer/data/record_stream.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/metrics/metrics.h"
#include "trainer/ppo/async_schedule.h"
#include "trainer/ppo/batch_worker.h"
#include "trainer/ppo/ppo_log.h"
#include "trainer/update/rollout_batch.h"
#include "trainer/workers/ppo_workers.h"

namespace ferry::trainer {

using PromptParser = std::function<EncodedPrompt(const Record&)>;
PromptParser prompt_parser(const PromptEncoder& encoder, const PpoConfig& config);

class RolloutLoop {
 public:
  // All outlive this. `ends_ahead(step)`: whether nothing may be answered ahead of the end of that
  // step, which is saved, or the last. `step`: those that are done.
  RolloutLoop(const PpoConfig& config,
              const PromptEncoder& encoder,
              RecordStream& stream,
              PpoWorkers& workers,
              BatchWorker& batch_worker,
              PpoLog& log,
              std::function<bool(std::int64_t)> ends_ahead,
              std::int64_t step);

  // The rows that step + 1 learns from, with scores; the rollout sleeps behind it.
  // `step`: those that are done. Throws Error(kUsage) where the groups of
  // algorithm.filter_groups.max_num_gen_batches batches do not suffice.
  RolloutBatch next_batch(std::int64_t step);
  // Answers the validation's prompts with the weights behind `step`, and writes their samples.
  Metrics validate(std::int64_t step);

  // The weights behind `step` for the rollout, unless it has them.
  void wake(std::int64_t step);
  void sleep();
  bool is_answering_ahead() const { return call_.has_value(); }
  void finish_answering_ahead() { finish(); }

 private:
  // The rows that a step learns from.
  struct Answering {
    std::int64_t step = 0;
    std::vector<EncodedPrompt> prompts{};
    RolloutBatch batch{};    // of the prompts; once they are there, with responses
    std::int64_t epoch = 0;  // of the data, once the prompts are drawn
    bool has_left = false;   // columns are kept by the actor's ranks, not by the rollout's
  };

  std::vector<EncodedPrompt> next_prompts(RecordStream& records, int size) const;
  // n rows of each; `draw` and `first` tell the draws of a step apart.
  RolloutBatch rows_of(std::span<const EncodedPrompt> prompts,
                       std::int64_t n,
                       std::uint64_t draw,
                       std::int64_t first,
                       std::int64_t step) const;
  Answering draw(std::int64_t step, std::int64_t first);
  // Asks for the responses of so many steps.
  void start(std::int64_t step, std::int64_t first, std::int64_t count);
  void start_partial(std::int64_t step);
  // Waits for the responses that were asked for.
  void finish();
  RolloutBatch taken_from_under_way(const RolloutBatch& answer);
  // `step`: of the journal of sessions.
  void generate(RolloutBatch& batch, const Sampling& sampling, std::int64_t step, bool validates);
  // `batch`: in hand. Columns leave the rollout's ranks, which have no time for it then.
  void answer_ahead(std::int64_t step, RolloutBatch& batch, bool has_left);
  void leave(RolloutBatch& batch);
  void add_rewards(RolloutBatch& batch);
  void add_reward_baselines(RolloutBatch& batch,
                            std::span<const EncodedPrompt> prompts,
                            std::int64_t step);

  const PpoConfig& config_;
  const PromptEncoder& encoder_;
  RecordStream& stream_;
  PpoWorkers& workers_;
  BatchWorker& batch_worker_;
  PpoLog& log_;
  AsyncSchedule schedule_;
  bool awake_ = false;                     // the rollout, with the newest weights
  std::optional<WorkerGroup::Call> call_;  // under way
  std::vector<Answering> asked_;           // by it
  std::deque<Answering> answered_;         // for this step and later ones
  std::int64_t last_asked_;                // step whose batch has been asked for
  // The state of partial rollouts, with all rows of a prompt:
  RolloutBatch drawn_, under_way_;  // not asked for yet, and asked for
  std::int64_t last_drawn_;         // step whose prompts have been drawn
  std::int64_t num_started_;        // prompts of the run that were asked for
  std::int64_t epoch_ = 0;          // of the last that were drawn
};

}  // namespace ferry::trainer
