// A run of GRPO on one rank of the host, with all its parts and a tiny random model: two prompts a
// step, two answers to each.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "distckpt/storage/file_io.h"
#include "models/distributed/world.h"
#include "tests/support/models/tiny_model.h"
#include "tests/support/temp_dir.h"
#include "tests/trainer/dataset/byte_folder.h"
#include "trainer/agents/tools.h"
#include "trainer/engine/run_options.h"
#include "trainer/ppo/batch_worker.h"
#include "trainer/ppo/ppo_log.h"
#include "trainer/ppo/rollout_loop.h"
#include "trainer/run/training_run.h"
#include "trainer/workers/ppo_workers.h"

namespace ferry::support {

inline constexpr const char* kSums =
    R"({"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1+1?"}],)"
    R"( "reward_model": {"style": "rule", "ground_truth": "2"}})"
    "\n"
    R"({"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1+20?"}],)"
    R"( "reward_model": {"style": "rule", "ground_truth": "21"}})"
    "\n";

class TinyRun {
 public:
  // `adapt` changes the configuration before anything is made of it.
  explicit TinyRun(const std::function<void(trainer::PpoConfig&)>& adapt = {})
      : config(make_config(adapt)) {
    workers.add("see", {.name = "see"}, trainer::one_to_all(world),
                [this](const trainer::WorkerData& call) {
                  seen_ = call.batch;
                  return trainer::WorkerData();
                });
  }

  // The batch with the columns that workers keep.
  trainer::RolloutBatch see(const trainer::RolloutBatch& batch) {
    (void)workers.ask("see", batch);
    return seen_;
  }

  std::filesystem::path folder() const { return dir_ / "run"; }
  std::string read(const char* name) const { return distckpt::read_text(folder() / name); }

 private:
  trainer::PpoConfig make_config(const std::function<void(trainer::PpoConfig&)>& adapt) const {
    write_tiny_model({.vocab = 260}, dir_ / "model", 1);
    distckpt::write_text(dir_ / "model/tokenizer.json",
                         rollout::text::byte_level_tokenizer().dump());
    distckpt::write_text(dir_ / "model/tokenizer_config.json", "{\"eos_token\": \"<s>\"}");
    distckpt::write_text(dir_ / "model/chat_template.jinja", kLetters);
    distckpt::write_text(dir_ / "sums.jsonl", kSums);
    auto made = trainer::default_ppo_config("grpo");
    made.model.path = (dir_ / "model").string();
    made.data.train_files = made.data.val_files = {(dir_ / "sums.jsonl").string()};
    made.data.train_batch_size = made.actor.ppo_mini_batch_size = 2;
    made.data.max_prompt_length = 16;
    made.data.max_response_length = 6;
    made.data.shuffle = false;
    made.rollout.n = 2;
    made.rollout.kv_cache_bytes = 1 << 20;
    made.rollout.max_num_seqs = 8;
    made.trainer.run.default_local_dir = folder().string();
    made.trainer.run.device = trainer::DeviceKind::kCpu;
    made.trainer.run.logger = {trainer::Logger::kFile};
    if (adapt) adapt(made);
    std::filesystem::create_directories(folder());
    return made;
  }

  TempDir dir_;
  trainer::RolloutBatch seen_;

 public:
  trainer::PpoConfig config;
  models::World world{{}};
  std::shared_ptr<const converter::Checkpoint> origin = trainer::open_checkpoint(config.model);
  trainer::Tools tools{};
  trainer::PromptEncoder encoder{trainer::tokenizer_folder(config.model, *origin), config.data};
  trainer::PpoWorkers workers{world, config, origin, encoder, tools, /*total_steps=*/4};
  trainer::BatchWorker batch_worker{config, encoder, world, workers, /*step=*/0};
  trainer::RecordStream stream =
      trainer::open_records(config.data, config.trainer.run, /*training=*/true);
  std::vector<std::string> said{};
  trainer::PpoLog log{config,
                      world,
                      origin->map.config,
                      /*step=*/0,
                      /*total_steps=*/4,
                      [this](const std::string& line) { said.push_back(line); }};
  trainer::RolloutLoop rollout{config,
                               encoder,
                               stream,
                               workers,
                               batch_worker,
                               log,
                               [](std::int64_t) { return false; },
                               /*step=*/0,
                               /*total_steps=*/4};
};

}  // namespace ferry::support
