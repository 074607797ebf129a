#include <fmt/format.h>

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cli/torch/commands.h"
#include "distckpt/error.h"
#include "models/world.h"
#include "trainer/config/sft_config.h"
#include "trainer/sft_options.h"
#include "trainer/sft_trainer.h"

namespace ferry::cli {
namespace {

struct Flags {
  std::string config{};
  std::vector<std::string> overrides{};
  bool print_config = false;
  bool quiet = false;
};

void train_sft(const Flags& flags) {
  if (flags.print_config && flags.config.empty() && flags.overrides.empty()) {
    fmt::print("{}", trainer::to_toml(trainer::SftConfig{}));
    return;
  }
  const auto config = trainer::load_sft_config(flags.config, flags.overrides);
  if (flags.print_config) {
    fmt::print("{}", trainer::to_toml(config));
    return;
  }
  auto world = models::World::from_environment(trainer::world_options(config));
  const auto say = [&](const std::string& line) {
    if (!flags.quiet) fmt::print(stderr, "{}\n", line);
  };
  trainer::SftTrainer trainer(config, world, {.say = say});
  trainer.run();
}

}  // namespace

void add_train(CLI::App& app) {
  auto* const train = app.add_subcommand("train", "Train a model");
  train->require_subcommand(1);
  const auto flags = std::make_shared<Flags>();
  auto* const sft = train->add_subcommand(
      "sft", "Supervised fine-tuning on conversations, from a checkpoint of any format");
  sft->add_option("--config", flags->config, "The run: a TOML file, docs/training_config.md");
  sft->add_option("overrides", flags->overrides, "Settings that replace the file's: optim.lr=1e-5");
  sft->add_flag(
      "--print-config", flags->print_config,
      "Print every setting with its value and meaning, and stop; without --config the defaults");
  sft->add_flag("-q,--quiet", flags->quiet, "Say nothing of the steps");
  sft->footer("Exit status: 0 trained to the last step, 2 trouble.");
  sft->callback([flags] { train_sft(*flags); });
}

}  // namespace ferry::cli
