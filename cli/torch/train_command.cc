#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/torch/commands.h"
#include "distckpt/error.h"
#include "models/failure_board.h"
#include "models/world.h"
#include "trainer/config/sft_config.h"
#include "trainer/run_options.h"
#include "trainer/sft_trainer.h"

namespace ferry::cli {
namespace {

struct Flags {
  std::string config{};
  std::vector<std::string> overrides{};
  bool print_config = false;
  bool quiet = false;
};

// What ends one rank ends the run. It says so, and so do the others, before a launcher ends them
// all.
[[noreturn]] void end_rank(const models::World& world, Error error) {
  error.add_context(fmt::format("running as rank {} of {}", world.rank(), world.size()));
  fmt::print(stderr, "{}", error.report());
  models::announce_failure(world, error.what());
  models::wait_for_failures(world);
  throw CLI::RuntimeError(kTrouble);
}

void run_rank(const models::World& world, const std::function<void()>& body) {
  if (world.size() == 1) return body();
  try {
    body();
  } catch (const Error& error) {
    end_rank(world, error);
  } catch (const c10::Error& error) {  // what() has a backtrace
    end_rank(world, Error(ErrorKind::kBug, error.what_without_backtrace()));
  } catch (const std::exception& error) {
    end_rank(world, Error(ErrorKind::kBug, error.what()));
  }
}

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
  auto world = models::World::from_environment(trainer::world_options(config.trainer));
  const auto say = [&](const std::string& line) {
    if (!flags.quiet) fmt::print(stderr, "{}\n", line);
  };
  run_rank(world, [&] {
    trainer::SftTrainer trainer(config, world, {.say = say});
    trainer.run();
  });
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
