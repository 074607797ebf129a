#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "cli/commands.h"
#include "cli/torch/commands.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "models/distributed/world.h"
#include "trainer/config/ppo_config.h"
#include "trainer/config/sft_config.h"
#include "trainer/engine/run_options.h"
#include "trainer/ppo/ppo_trainer.h"
#include "trainer/replicas/rollout_replica.h"
#include "trainer/rewards/code_reward.h"
#include "trainer/sft/sft_trainer.h"

namespace ferry::cli {
namespace {

namespace fs = std::filesystem;

struct TrainFlags {
  std::string config{};
  std::vector<std::string> overrides{};
  std::optional<std::string> reward_command{};
  bool print_config = false;
  bool quiet = false;
};

template <typename Trainer, typename Config>
void train(const TrainFlags& flags,
           const Config& config,
           const trainer::TrainerConfig& run,
           const std::vector<std::string>& notes) {
  auto world = models::World::from_environment(trainer::world_options(run));
  const auto say = [&](const std::string& line) {
    if (!flags.quiet) std::fputs((line + '\n').c_str(), stderr);  // a full disk ends no run
  };
  for (const auto& note : notes) {
    if (world.rank() == 0) say(note);
  }
  run_rank(world, [&] {
    Trainer trainer(config, world, {.say = say});
    if (!world.device().is_cuda()) return trainer.run();
    // Says why it fails before it gives its memory back, for which other ranks would wait. Ranks
    // on the host notice by the connections that this closes.
    run_rank(world, [&] { trainer.run(); });
  });
}

// Prints the configuration if that is all that was asked for; else trains.
template <typename Trainer, typename Load, typename Default, typename Run>
void print_or_train(const TrainFlags& flags,
                    const Load& load,
                    const Default& defaults,
                    const Run& run) {
  if (flags.print_config && flags.config.empty() && flags.overrides.empty()) {
    fmt::print("{}", trainer::to_toml(defaults()));
    return;
  }
  std::vector<std::string> notes;
  const auto config = load(&notes);
  if (flags.print_config)
    fmt::print("{}", trainer::to_toml(config));
  else
    train<Trainer>(flags, config, run(config), notes);
}

void train_sft(const TrainFlags& flags) {
  print_or_train<trainer::SftTrainer>(
      flags,
      [&](auto* notes) { return trainer::load_sft_config(flags.config, flags.overrides, notes); },
      [] { return trainer::SftConfig{}; },
      [](const trainer::SftConfig& config) { return config.trainer; });
}

// True if one of the run's programs asks for a sandbox.
bool uses_sandbox(const trainer::PpoConfig& config) {
  const auto& agents = config.rollout.agents;
  std::vector<std::string> texts{config.reward.command, agents.agent.env_command};
  if (std::error_code none; fs::exists(agents.multi_turn.tool_config_path, none))
    texts.push_back(distckpt::read_text(agents.multi_turn.tool_config_path));
  return std::ranges::any_of(texts, [](const std::string& text) {
    return text.find("ferry sandbox") != text.npos ||
           (text.find("ferry score") != text.npos && text.find("--rules") == text.npos);
  });
}

// Sandboxes hide the run's questions, which have the answers beside them, and all that it writes.
// Throws Error(kUsage) where the run needs a sandbox, and none can be made: before the first step.
void prepare_sandboxes(const trainer::PpoConfig& config) {
  std::vector<std::string> hidden{config.trainer.run.default_local_dir};
  for (const auto* files : {&config.data.train_files, &config.data.val_files})
    hidden.insert(hidden.end(), files->begin(), files->end());
  for (auto& path : hidden) path = fs::absolute(path).lexically_normal().string();
  if (const char* const more = std::getenv("FERRY_SANDBOX_HIDE")) hidden.emplace_back(more);
  setenv("FERRY_SANDBOX_HIDE", fmt::format("{}", fmt::join(hidden, ":")).c_str(), 1);
  if (!uses_sandbox(config)) return;
  const auto program = fs::read_symlink("/proc/self/exe").parent_path() / "ferry";
  trainer::require_sandbox({program.string(), "sandbox", "--"});
}

// `algorithm`: ppo or grpo.
void train_ppo(TrainFlags flags, const std::string& algorithm) {
  if (flags.reward_command) {
    constexpr std::string_view kKey = "reward_model.command=";
    const bool twice = std::ranges::any_of(
        flags.overrides, [&](const std::string& text) { return text.starts_with(kKey); });
    require(!twice, ErrorKind::kUsage, "--reward-command and {}: name the program that scores once",
            kKey);
    flags.overrides.push_back(std::string(kKey) + *flags.reward_command);
  }
  print_or_train<trainer::PpoTrainer>(
      flags,
      [&](auto* notes) {
        return trainer::load_ppo_config(algorithm, flags.config, flags.overrides, notes);
      },
      [&] { return trainer::default_ppo_config(algorithm); },
      [](const trainer::PpoConfig& config) {
        prepare_sandboxes(config);
        return config.trainer.run;
      });
}

CLI::App* add_training(CLI::App& train,
                       const char* name,
                       const char* what,
                       const std::shared_ptr<TrainFlags>& flags,
                       const std::function<void(const TrainFlags&)>& run) {
  auto* const command = train.add_subcommand(name, what);
  command->add_option("--config", flags->config,
                      "The run: a TOML file, docs/training/configuration.md");
  command->add_option("overrides", flags->overrides,
                      "Settings that replace the file's: trainer.seed=1");
  command->add_flag(
      "--print-config", flags->print_config,
      "Print every setting with its value and meaning, and stop; without --config the defaults");
  command->add_flag("-q,--quiet", flags->quiet, "Say nothing of the steps");
  command->footer("Exit status: 0 trained to the last step, 2 trouble.");
  command->callback([flags, run] { run(*flags); });
  return command;
}

void add_replica(CLI::App& train) {
  struct Flags {
    std::string socket{};
    std::optional<std::size_t> slot{};
    std::optional<int> gpu{};
  };
  const auto flags = std::make_shared<Flags>();
  auto* const command = train.add_subcommand(
      "replica", "Answer beside a rank of the rollout of a run on this machine, until it ends");
  command
      ->add_option("socket", flags->socket,
                   "RUN/replicas/rank<R>.sock of a run with rollout.replicas.elastic")
      ->required();
  command->add_option("--slot", flags->slot, "The number that the rank has given it");
  command
      ->add_option("--gpu", flags->gpu,
                   "The GPU that it computes on, in a run with trainer.device=cuda. Default: 0")
      ->check(CLI::NonNegativeNumber);
  command->footer("Exit status: 0 the run has ended, 2 trouble.");
  command->callback([flags] { trainer::run_replica(flags->socket, flags->slot, flags->gpu); });
}

}  // namespace

void add_train(CLI::App& app) {
  auto* const train = app.add_subcommand("train", "Train a model");
  train->require_subcommand(1);
  train->footer("");  // each has its own
  add_training(*train, "sft",
               "Supervised fine-tuning on conversations, from a checkpoint of any format",
               std::make_shared<TrainFlags>(), train_sft);
  for (const char* const algorithm : {"grpo", "ppo"}) {
    const auto flags = std::make_shared<TrainFlags>();
    auto* const command = add_training(
        *train, algorithm,
        algorithm == std::string("grpo")
            ? "Reinforcement learning by GRPO and its relatives: answers against each other"
            : "Reinforcement learning by PPO: answers against what a critic expects",
        flags, [algorithm](const TrainFlags& given) { train_ppo(given, algorithm); });
    command->add_option_function<std::string>(
        "--reward-command",
        [flags](const std::string& program) { flags->reward_command = program; },
        "A program that scores the answers: docs/training/rewards.md");
  }
  add_replica(*train);
}

}  // namespace ferry::cli
