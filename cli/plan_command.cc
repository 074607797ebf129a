#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/report/json.h"
#include "cli/report/plan.h"
#include "converter/bridge/load.h"
#include "converter/families/hf_config.h"
#include "converter/open/checkpoint.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "trainer/config/config_value.h"
#include "trainer/plan/auto_settings.h"

namespace ferry::cli {
namespace {

namespace fs = std::filesystem;

struct PlanFlags {
  std::string config{};
  std::vector<std::string> overrides{};
  std::string algorithm{};
  std::string device = "H100";
  std::string memory{};
  std::string host_memory{};
  int ranks_per_host = 8;
  int ranks = 0;
  bool json = false;
};

// config.json is enough: weights need not be there.
models::TransformerConfig model_of(const trainer::ModelConfig& config) {
  for (const auto& folder : {config.hf_config_path, config.path}) {
    const auto file = fs::path(folder) / "config.json";
    if (!folder.empty() && fs::exists(file))
      return converter::parse_hf_config(distckpt::read_text(file), file.string());
  }
  return converter::open(config.path, {.hf_config = config.hf_config_path}).map.config;
}

// The program that a file is for, by its sections.
std::string algorithm_of(const PlanFlags& flags) {
  if (!flags.algorithm.empty()) return flags.algorithm;
  bool reinforces = false, has_critic = false;
  for (const auto& entry : trainer::read_entries(flags.config, flags.overrides)) {
    reinforces = reinforces || entry.key.starts_with("actor_rollout_ref.");
    has_critic = has_critic || entry.key.starts_with("critic.");
  }
  if (!reinforces) return "sft";
  return has_critic ? "ppo" : "grpo";
}

trainer::DeviceSpec device_of(const PlanFlags& flags, trainer::DeviceKind kind) {
  trainer::DeviceSpec device{.name = "host", .on_host = true};
  if (kind == trainer::DeviceKind::kCuda) {
    const auto known = trainer::find_device(flags.device);
    require(known.has_value(), ErrorKind::kUsage, "--device {}: is none of {}", flags.device,
            fmt::join(trainer::device_names(), ", "));
    device = *known;
  } else {
    device.memory = std::int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGESIZE);
  }
  if (!flags.memory.empty()) device.memory = parse_size(flags.memory, "--memory");
  return device;
}

// Ranks lie on hosts one after another. None where the hosts' memory is not said.
std::vector<trainer::HostShare> hosts_of(const PlanFlags& flags, int ranks) {
  std::vector<trainer::HostShare> hosts;
  if (flags.host_memory.empty()) return hosts;
  const auto memory = parse_size(flags.host_memory, "--host-memory");
  for (int rank = 0; rank < ranks; ++rank)
    hosts.push_back(
        {.host = fmt::format("host {}", rank / flags.ranks_per_host), .available = memory});
  return hosts;
}

template <typename Config, typename Models>
void plan(const PlanFlags& flags,
          const Config& config,
          const Models& models,
          trainer::DeviceKind kind,
          int ranks) {
  const auto device = device_of(flags, kind);
  const auto hosts = hosts_of(flags, ranks);
  const auto chosen = trainer::choose_settings(config, models, ranks, device, hosts);
  const auto setup = trainer::setup_of(chosen.config, models, ranks, device);
  auto plan = trainer::plan_run(setup);
  std::ranges::move(trainer::host_misfits(plan, hosts), std::back_inserter(plan.misfits));
  if (auto misfit = trainer::replica_misfit(setup, plan))
    plan.misfits.push_back(std::move(*misfit));
  const PlanChoice choice{.settings = chosen.settings, .offload = chosen.offload};
  if (flags.json)
    fmt::print("{}\n", json_text(plan_json(setup, choice, plan)));
  else
    fmt::print("{}", plan_text(setup, choice, plan));
  if (plan.fits()) return;
  fmt::print(stderr, "{}",
             Error(ErrorKind::kDevice, "the run does not fit",
                   fmt::format("{}", fmt::join(plan.misfits, "\n")))
                 .report());
  throw CLI::RuntimeError(kTrouble);
}

void run(const PlanFlags& flags) {
  const auto algorithm = algorithm_of(flags);
  if (algorithm == "sft") {
    const auto config = trainer::load_sft_config(flags.config, flags.overrides);
    return plan(flags, config, model_of(config.model), config.trainer.device,
                flags.ranks > 0 ? flags.ranks : config.engine.parallel.world_size());
  }
  const auto config = trainer::load_ppo_config(algorithm, flags.config, flags.overrides);
  trainer::ModelsOfRun models{.actor = model_of(config.model)};
  models.critic = config.critic.model.path.empty() ? models.actor : model_of(config.critic.model);
  models.critic = converter::with_value_head(models.critic);
  if (config.reward.enable) models.reward = model_of(config.reward.model);
  plan(flags, config, models, config.trainer.run.device,
       flags.ranks > 0 ? flags.ranks : config.actor.megatron.parallel.world_size());
}

}  // namespace

void add_plan(CLI::App& app) {
  const auto flags = std::make_shared<PlanFlags>();
  auto* const command = app.add_subcommand(
      "plan", "Say what a run will take, before it begins: memory, seconds, what fits");
  command->add_option("config", flags->config,
                      "The run: a TOML file, docs/training/configuration.md");
  command->add_option("overrides", flags->overrides,
                      "Settings that replace the file's: trainer.seed=1");
  command
      ->add_option("--algorithm", flags->algorithm,
                   "The run's. Default: sft without a section actor_rollout_ref, ppo with one "
                   "named critic, else grpo")
      ->check(CLI::IsMember({"sft", "grpo", "ppo"}));
  command
      ->add_option("--ranks", flags->ranks,
                   "Ranks of the run, one for each device. Default: as few as its mesh needs")
      ->check(CLI::Range(1, 1'000'000));
  command
      ->add_option(
          "--device", flags->device,
          fmt::format("The GPU of each rank: {}", fmt::join(trainer::device_names(), ", ")))
      ->capture_default_str();
  command->add_option("--memory", flags->memory, "Its memory, if another: 40GiB");
  command->add_option("--host-memory", flags->host_memory,
                      "Memory of each host that may be pinned: 1TiB. Default: all that it takes");
  command->add_option("--ranks-per-host", flags->ranks_per_host, "Ranks that share a host's memory")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  add_json(*command, flags->json);
  command->footer("Exit status: 0 it fits, 2 it does not, or trouble.");
  command->callback([flags] {
    // A run may be described by settings alone.
    if (flags->config.find('=') != std::string::npos)
      flags->overrides.insert(flags->overrides.begin(), std::exchange(flags->config, {}));
    run(*flags);
  });
}

}  // namespace ferry::cli
