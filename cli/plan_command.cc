#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/plan_meshes.h"
#include "cli/report/json.h"
#include "converter/bridge/load.h"
#include "converter/families/hf_config.h"
#include "converter/open/checkpoint.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "trainer/config/config_value.h"
#include "trainer/config/ppo_rules.h"
#include "trainer/plan/auto_settings.h"

namespace ferry::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kDevice = "H100";

struct PlanFlags {
  std::string config{};
  std::vector<std::string> overrides{};
  std::string algorithm{};
  std::optional<std::string> device{};
  std::string memory{};
  std::string host_memory{};
  int ranks_per_host = 8;
  std::int64_t image_tokens = 0;
  int ranks = 0;
  std::size_t meshes = 0;
  bool json = false;
};

// config.json is enough: weights need not be there.
models::TransformerConfig read_model(const trainer::ModelConfig& config) {
  for (const auto& folder : {config.hf_config_path, config.path}) {
    const auto file = fs::path(folder) / "config.json";
    if (!folder.empty() && fs::exists(file))
      return converter::parse_hf_config(distckpt::read_text(file), file.string());
  }
  return converter::open(config.path, {.hf_config = config.hf_config_path}).map.config;
}

// The models of a run, each of which is read once, whichever mesh it is planned for. Thread-safe.
class Models {
 public:
  models::TransformerConfig of(const trainer::ModelConfig& config) {
    const std::lock_guard lock(mutex_);
    const auto [found, is_new] = known_.try_emplace({config.path, config.hf_config_path});
    try {
      if (is_new) found->second = read_model(config);
    } catch (...) {
      known_.erase(found);
      throw;
    }
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, models::TransformerConfig> known_;
};

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
    const auto name = flags.device.value_or(kDevice);
    const auto known = trainer::find_device(name);
    require(known.has_value(), ErrorKind::kUsage, "--device {}: is none of {}", name,
            fmt::join(trainer::device_names(), ", "));
    device = *known;
  } else {
    require(!flags.device, ErrorKind::kUsage,
            "--device {}: has no effect: trainer.device of the run is cpu",
            flags.device.value_or(""));
    require(flags.host_memory.empty(), ErrorKind::kUsage,
            "--host-memory: has no effect: trainer.device of the run is cpu, whose memory is "
            "--memory");
    require(flags.image_tokens == 0, ErrorKind::kUsage,
            "--image-tokens: has no effect: trainer.device of the run is cpu, whose seconds are "
            "not planned");
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

// Images of sequences are counted where some model of the run sees them.
void add_images(std::int64_t tokens, trainer::RunSetup& setup) {
  if (tokens == 0) return;
  const bool sees = std::ranges::any_of(
      setup.roles, [](const auto& role) { return role.model.computes_vision(); });
  require(sees, ErrorKind::kUsage,
          "--image-tokens: has no effect: no model of the run has a vision tower that is computed");
  const auto most = setup.rollout ? setup.prompt_tokens : setup.longest_sequence;
  require(tokens <= most, ErrorKind::kUsage, "--image-tokens {}: a {} has {} tokens at most",
          tokens, setup.rollout ? "prompt" : "sequence", most);
  setup.image_tokens = tokens;
}

template <typename Config, typename Models>
trainer::PlannedRun planned(const PlanFlags& flags,
                            const Config& config,
                            const Models& models,
                            trainer::DeviceKind kind,
                            int mesh_size) {
  const int ranks = flags.ranks > 0 ? flags.ranks : mesh_size;
  const auto device = device_of(flags, kind);
  const auto hosts = hosts_of(flags, ranks);
  const auto chosen = trainer::choose_settings(config, models, ranks, device, hosts);
  trainer::PlannedRun run{.setup = trainer::setup_of(chosen.config, models, ranks, device),
                          .choice = {.settings = chosen.settings, .offload = chosen.offload}};
  add_images(flags.image_tokens, run.setup);
  run.plan = trainer::plan_run(run.setup);
  std::ranges::move(trainer::host_misfits(run.plan, hosts), std::back_inserter(run.plan.misfits));
  if (auto misfit = trainer::replica_misfit(run.setup, run.plan))
    run.plan.misfits.push_back(std::move(*misfit));
  return run;
}

// The run with these settings on top of its own.
trainer::PlannedRun planned(const PlanFlags& flags,
                            Models& known,
                            const std::vector<std::string>& settings = {}) {
  auto overrides = flags.overrides;
  overrides.insert(overrides.end(), settings.begin(), settings.end());
  const auto algorithm = algorithm_of(flags);
  if (algorithm == "sft") {
    const auto config = trainer::load_sft_config(flags.config, overrides);
    return planned(flags, config, known.of(config.model), config.trainer.device,
                   config.engine.parallel.world_size());
  }
  const auto config = trainer::load_ppo_config(algorithm, flags.config, overrides);
  trainer::ModelsOfRun models{.actor = known.of(config.model)};
  models.critic = config.critic.model.path.empty() ? models.actor : known.of(config.critic.model);
  models.critic = converter::with_value_head(models.critic);
  if (config.reward.enable) models.reward = known.of(config.reward.model);
  return planned(flags, config, models, config.trainer.run.device,
                 config.actor.megatron.parallel.world_size());
}

// The meshes that a run of so many ranks may have.
MeshSpace mesh_space(const PlanFlags& flags, Models& known) {
  MeshSpace space{.ranks = flags.ranks, .ranks_per_host = flags.ranks_per_host};
  const auto take = [&](const trainer::ModelConfig& config, trainer::DeviceKind kind) {
    require(kind == trainer::DeviceKind::kCuda, ErrorKind::kUsage,
            "--meshes: the seconds of a run on the host are not planned: trainer.device=cuda");
    const auto model = known.of(config);
    space.layers = model.num_layers;
    space.experts = model.num_moe_experts;
  };
  const auto algorithm = algorithm_of(flags);
  if (algorithm == "sft") {
    const auto config = trainer::load_sft_config(flags.config, flags.overrides);
    take(config.model, config.trainer.device);
    space.engine = trainer::memory_settings(config).engine;
  } else {
    const auto config = trainer::load_ppo_config(algorithm, flags.config, flags.overrides);
    take(config.model, config.trainer.run.device);
    space.engine = trainer::memory_settings(config, trainer::Role::kActor).engine;
    space.rollout = trainer::kRolloutSection;
  }
  for (const auto& override : flags.overrides)
    space.fixed.insert(override.substr(0, override.find('=')));
  return space;
}

void compare_meshes(const PlanFlags& flags) {
  require(flags.ranks > 0, ErrorKind::kUsage, "--meshes: --ranks says of how many ranks");
  Models known;
  const auto meshes = plan_meshes(
      mesh_space(flags, known),
      [&](const std::vector<std::string>& settings) { return planned(flags, known, settings); },
      flags.meshes);
  if (flags.json)
    fmt::print("{}\n", json_text(meshes_json(meshes)));
  else
    fmt::print("{}", meshes_text(meshes));
  if (meshes.fit > 0) return;
  fmt::print(stderr, "{}",
             Error(ErrorKind::kDevice,
                   fmt::format("none of {} meshes of {} ranks fits", meshes.planned, flags.ranks))
                 .report());
  throw CLI::RuntimeError(kTrouble);
}

void run(const PlanFlags& flags) {
  if (flags.meshes > 0) return compare_meshes(flags);
  Models known;
  const auto run = planned(flags, known);
  if (flags.json)
    fmt::print("{}\n", json_text(plan_json(run)));
  else
    fmt::print("{}", trainer::plan_text(run));
  if (run.plan.fits()) return;
  fmt::print(stderr, "{}",
             Error(ErrorKind::kDevice, "the run does not fit",
                   fmt::format("{}", fmt::join(run.plan.misfits, "\n")))
                 .report());
  throw CLI::RuntimeError(kTrouble);
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
      ->default_str(kDevice);
  command->add_option("--memory", flags->memory, "Its memory, if another: 40GiB");
  command->add_option("--host-memory", flags->host_memory,
                      "Memory of each host that may be pinned: 1TiB. Default: all that it takes");
  command->add_option("--ranks-per-host", flags->ranks_per_host, "Ranks that share a host's memory")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  command
      ->add_option("--image-tokens", flags->image_tokens,
                   "Tokens of an image that each sequence has, for the seconds of a vision tower. "
                   "Default: none")
      ->check(CLI::Range(1, 1 << 30));
  command
      ->add_option("--meshes", flags->meshes,
                   "Instead plan meshes of --ranks, with sizes that are powers of two, and show so "
                   "many of those that take the fewest seconds. Sizes given as KEY=VALUE stay")
      ->check(CLI::Range(1, 1000));
  add_json(*command, flags->json);
  command->footer("Exit status: 0 it fits, 2 it does not, or trouble.");
  command->callback([command, flags] {
    require_effective(*command, {{.here = flags->host_memory.empty() && flags->meshes == 0,
                                  .options = {"--ranks-per-host"},
                                  .why = "it is of --host-memory and --meshes"}});
    // A run may be described by settings alone.
    if (flags->config.find('=') != std::string::npos)
      flags->overrides.insert(flags->overrides.begin(), std::exchange(flags->config, {}));
    run(*flags);
  });
}

}  // namespace ferry::cli
