// PPO, GRPO and their relatives (verl's ray_trainer): the loop of ferry train ppo|grpo. Rank 0 runs
// it and has the batch, whose parts the workers of all ranks compute:
//
//   prompts -> n answers each, by the rollout -> rewards -> log-probabilities of the policy as it
//   was, of the reference, values -> advantages -> critic and actor learn -> the actor's weights to
//   the rollout
//
// A step is a function of the seed, its number and the weights: a run that was stopped goes on as
// if it had not been. One step off (trainer.one_step_off) the rollout answers the prompts of step k
// + 1 on its own ranks while step k learns, with the weights that step k began with. Before a
// checkpoint nothing is answered ahead, so that a run that goes on from it is where the other one
// was.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "converter/open/checkpoint.h"
#include "models/distributed/world.h"
#include "trainer/algorithms/kl_penalty.h"
#include "trainer/config/ppo_config.h"
#include "trainer/data/record_stream.h"
#include "trainer/dataset/prompt_examples.h"
#include "trainer/engine/peak_memory.h"
#include "trainer/metrics/metric_log.h"
#include "trainer/metrics/sample_log.h"
#include "trainer/metrics/timeline.h"
#include "trainer/ppo/ppo_resume.h"
#include "trainer/update/data_proto.h"
#include "trainer/workers/ppo_workers.h"

namespace ferry::trainer {

struct PpoOutput {
  // Of rank 0: a line for people, without its newline.
  std::function<void(const std::string&)> say = [](const std::string&) {};
};

class PpoTrainer {
 public:
  // Called by all ranks: loads the models, or the newest checkpoints of the run. Throws Error.
  PpoTrainer(const PpoConfig& config, models::World& world, PpoOutput output = {});
  ~PpoTrainer();

  // Called by all ranks: from where it stands to the last step. Throws Error(kCorrupt) after too
  // many steps in a row without a finite gradient.
  void run();

  std::int64_t step() const { return step_; }  // steps that are done
  std::int64_t total_steps() const { return total_steps_; }

 private:
  struct Sampling {
    double temperature = 1;
    std::int64_t top_k = -1;
    double top_p = 1;
    bool entropy = false;         // comes with the answers
    bool sampling_mask = false;   // comes with them
    bool routed_experts = false;  // come with them
  };

  // The answers to the first prompts of a step, asked for.
  struct Answering {
    std::vector<EncodedPrompt> prompts{};
    DataProto rows{};                         // of the prompts; once they are there, with answers
    std::optional<WorkerGroup::Call> call{};  // under way
    std::int64_t epoch = 0;                   // of the data, once the prompts are drawn
  };

  void fit();
  void resume();
  void save();
  bool saves_behind(std::int64_t step) const;
  void finish_save(bool wait = true);
  void export_hf() const;

  Metrics train_step();
  // Prompts that are answered and rewarded, as many as a step learns from.
  DataProto answered_batch(Metrics& metrics);
  std::function<EncodedPrompt(const Record&)> parser() const;
  std::vector<EncodedPrompt> next_prompts(RecordStream& records, int size) const;
  // n rows of each; `draw` and `first` tell the draws of a step apart.
  DataProto rows_of(std::span<const EncodedPrompt> prompts,
                    std::int64_t n,
                    std::uint64_t draw,
                    std::int64_t first,
                    std::int64_t step) const;
  DataProto generate(const DataProto& prompts, const Sampling& sampling);
  WorkerGroup::Call start_generating(const DataProto& prompts, const Sampling& sampling);
  Answering start_answering(std::int64_t step, std::int64_t first);
  void finish_answering(Answering& answering);
  void answer_ahead();
  void add_rewards(DataProto& batch);
  void add_reward_baselines(DataProto& batch, std::span<const EncodedPrompt> prompts);
  void add_log_probs(DataProto& batch, Metrics& metrics);
  void learn(DataProto& batch, Metrics& metrics);
  Metrics validate();
  void wake_rollout();
  void sleep_rollout();

  DataProto ask(const std::string& method,
                const DataProto& batch,
                const std::vector<std::string>& columns);
  // The same, of a role with data parallel ranks: which rows a mini-batch has does not depend on
  // these, and the answer's are in the order of the batch.
  DataProto ask_balanced(const std::string& method,
                         const DataProto& batch,
                         const std::vector<std::string>& columns,
                         std::int64_t mini_batch);
  DataProto tell(const std::string& method, nlohmann::json meta_info = nlohmann::json::object());
  template <typename Body>
  void phase(const char* name, Body&& body);
  void report(const Metrics& metrics);

  PpoConfig config_;
  models::World& world_;
  PpoOutput output_;
  std::shared_ptr<const converter::Checkpoint> origin_;
  PromptEncoder encoder_;
  RecordStream stream_;
  std::int64_t total_steps_;
  PpoStart start_;
  PpoWorkers workers_;
  KlController kl_;
  std::optional<double> peak_flops_;  // of a GPU; nothing where it is not known
  std::int64_t step_ = 0;
  int not_finite_ = 0;              // steps in a row
  bool awake_ = false;              // the rollout, with the weights of step_
  std::optional<Answering> ahead_;  // of the step after the one that learns
  PeakMemory memory_;               // of this step
  std::unique_ptr<Timeline> timeline_;
  std::vector<std::unique_ptr<MetricLog>> logs_;
  std::unique_ptr<SampleLog> rollout_log_, validation_log_;
};

}  // namespace ferry::trainer
