// Prompts in, answered and scored batches out, on rank 0: draws prompts, asks the rollout, has the
// responses rewarded, and leaves out groups that teach nothing (DAPO's dynamic sampling).
//
// In asynchronous runs (async_training, trainer.one_step_off) the rollout answers prompts of later
// steps on its own ranks while one learns, as AsyncSchedule says. Answers that are there before
// their steps lie beside a checkpoint, so that a run that goes on from it is where the other one
// was. With partial_rollout more prompts are under way than a step takes; it learns from those that
// are answered first, and the others go on when the rollout has the next weights.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "trainer/config/ppo_config.h"
#include "trainer/data/record_stream.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/metrics/metrics.h"
#include "trainer/ppo/async_schedule.h"
#include "trainer/ppo/batch_worker.h"
#include "trainer/ppo/pending_answers.h"
#include "trainer/ppo/ppo_log.h"
#include "trainer/update/rollout_batch.h"
#include "trainer/workers/ppo_workers.h"

namespace ferry::trainer {

using PromptParser = std::function<EncodedPrompt(const Record&)>;
PromptParser prompt_parser(const PromptEncoder& encoder, const PpoConfig& config);

class RolloutLoop {
 public:
  // All outlive this. `is_saved(step)`: whether a checkpoint is written behind that step. `step`:
  // those that are done, of `total_steps`.
  RolloutLoop(const PpoConfig& config,
              const PromptEncoder& encoder,
              RecordStream& stream,
              PpoWorkers& workers,
              BatchWorker& batch_worker,
              PpoLog& log,
              std::function<bool(std::int64_t)> is_saved,
              std::int64_t step,
              std::int64_t total_steps);

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

  // For a checkpoint behind `step`, while nothing is under way. The state of the stream before the
  // prompts of the next step: a run that does not take up what is pending goes on there.
  Record data_state(std::int64_t step) const;
  // Writes what is pending. Returns the number of its rows; without any there is no file.
  std::int64_t save_pending(std::int64_t step);
  // Takes up what the run in that folder had pending. Says why if it cannot: it is another run's,
  // or not there.
  void restore_pending(const std::filesystem::path& run, std::int64_t step);

 private:
  struct Answering : AnsweredBatch {
    bool has_left = false;  // columns are kept by the actor's ranks, not by the rollout's
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
  nlohmann::json settings_of_pending() const;
  void take_up(PendingReader& file);
  void carry_sessions(const RolloutBatch& sessions);
  RolloutBatch taken_from_under_way(const RolloutBatch& answer);
  // `step`: of the journal of sessions.
  void generate(RolloutBatch& batch, const Sampling& sampling, std::int64_t step, bool validates);
  // `batch`: in hand. Columns leave the rollout's ranks, which have no time for it then.
  void answer_ahead(std::int64_t step, RolloutBatch& batch, bool has_left);
  void leave(RolloutBatch& batch);
  void add_rewards(RolloutBatch& batch);
  void add_reward_baselines(RolloutBatch& batch, RolloutBatch greedy, std::int64_t step);

  const PpoConfig& config_;
  const PromptEncoder& encoder_;
  RecordStream& stream_;
  PpoWorkers& workers_;
  BatchWorker& batch_worker_;
  PpoLog& log_;
  AsyncSchedule schedule_;
  bool awake_ = false;                               // the rollout, with the newest weights
  std::optional<WorkerGroup::Call> call_;            // under way
  std::vector<Answering> asked_;                     // by it
  std::deque<Answering> answered_;                   // for this step and later ones
  std::map<std::int64_t, std::string> data_before_;  // by step: the stream before its prompts
  std::int64_t last_asked_;                          // step whose batch has been asked for
  // The state of partial rollouts, with all rows of a prompt:
  RolloutBatch drawn_, under_way_;  // not asked for yet, and asked for
  std::int64_t last_drawn_;         // step whose prompts have been drawn
  std::int64_t num_started_;        // prompts of the run that were asked for
  std::int64_t epoch_ = 0;          // of the last that were drawn
};

}  // namespace ferry::trainer
