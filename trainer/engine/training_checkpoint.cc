#include "trainer/engine/training_checkpoint.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <system_error>
#include <utility>

#include "converter/alignment/model_files.h"
#include "converter/bridge/load.h"
#include "converter/families/megatron_args.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/formats/torch_save/pickle_copy.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "distckpt/formats/torch_save/torch_save.h"
#include "distckpt/plan/mesh_layout.h"
#include "distckpt/plan/rank_group.h"
#include "distckpt/storage/filenames.h"
#include "distckpt/storage/work_folder.h"
#include "models/device/device.h"
#include "models/distributed/messages.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "models/reshard/device_box_io.h"

namespace ferry::trainer {
namespace fs = std::filesystem;
namespace {

using distckpt::PickleValue;
using distckpt::PickleWriter;

constexpr const char* kOwnEntry = "ferry_training";

// One group of parameters, as Megatron-Core tells them apart on loading (optimizer/__init__.py).
void write_group(PickleWriter& pickle,
                 const OptimizerParamScheduler& scheduler,
                 const DistributedOptimizer& optimizer,
                 bool expert,
                 double wd_mult) {
  const auto now = scheduler.now();
  const auto& config = optimizer.config();
  pickle.begin_dict();
  pickle.string("wd_mult").real(wd_mult).string("lr_mult").real(1.0);
  pickle.string("is_expert_parallel").boolean(expert).string("is_decoupled_lr").boolean(false);
  pickle.string("default_config").boolean(true);
  pickle.string("max_lr").real(scheduler.config().max_lr);
  pickle.string("min_lr").real(scheduler.config().min_lr);
  pickle.string("lr").real(now.lr).string("bias_correction").boolean(true);
  pickle.string("betas").begin_tuple().real(config.adam_beta1).real(config.adam_beta2).end_tuple();
  pickle.string("eps").real(config.adam_eps);
  pickle.string("weight_decay").real(now.weight_decay * wd_mult);
  pickle.string("step").integer(optimizer.num_steps());
  pickle.end_dict();
}

void write_scheduler(PickleWriter& pickle, const OptimizerParamScheduler& scheduler) {
  const auto& c = scheduler.config();
  pickle.string("opt_param_scheduler").begin_dict();
  pickle.string("max_lr").real(c.max_lr).string("lr_warmup_steps").integer(c.lr_warmup_steps);
  pickle.string("num_steps").integer(scheduler.num_steps());
  pickle.string("lr_decay_style").string(name_of(c.lr_decay_style));
  pickle.string("lr_decay_steps").integer(c.lr_decay_steps).string("min_lr").real(c.min_lr);
  pickle.string("start_wd").real(c.start_wd).string("end_wd").real(c.end_wd);
  pickle.string("wd_incr_style").string(name_of(c.wd_incr_style));
  pickle.string("wd_incr_steps").integer(c.wd_incr_steps);
  pickle.end_dict();
}

PickleValue entry(PickleValue dict, const char* key, const converter::Checkpoint& checkpoint) {
  const auto found = dict.find(key);
  require(found.has_value(), ErrorKind::kLayout, "{}: its common state has no {}",
          checkpoint.location.folder.string(), key);
  return *found;
}

// Throws unless the run that goes on trains the vision tower as the one that saved did.
void require_same_tower(const converter::Checkpoint& checkpoint, bool trained) {
  if (checkpoint.map.trains_tower == trained) return;
  throw Error(ErrorKind::kUsage,
              fmt::format("{}: its vision tower was {}trained, and would {}be now",
                          checkpoint.location.folder.string(), trained ? "not " : "",
                          trained ? "" : "not "),
              fmt::format("go on with freeze_vision_tower={}", trained));
}

constexpr std::string_view kHidden = ".superseded";

// Renamed first: what is half gone has no name that anybody looks for.
void remove_superseded(const CheckpointConfig& config, std::vector<std::int64_t> saved) {
  for (const auto iteration : superseded(std::move(saved), config.keep_last, config.keep_every)) {
    const auto name = distckpt::iteration_folder({iteration});
    const auto hidden = config.root / fmt::format(".{}{}", name, kHidden);
    fs::rename(config.root / name, hidden);
    fs::remove_all(hidden);
  }
}

// The iteration of ".iter_0000100.ferry" and ".iter_0000100.superseded".
std::optional<std::int64_t> hidden_iteration(const std::string& name, std::string_view suffix) {
  if (!name.starts_with('.') || !name.ends_with(suffix)) return std::nullopt;
  const auto parsed =
      distckpt::parse_iteration_folder(name.substr(1, name.size() - 1 - suffix.size()));
  return parsed ? parsed->number : std::nullopt;
}

}  // namespace

TrainingCheckpoint::TrainingCheckpoint(models::World& world,
                                       std::vector<models::GPTModel*> chunks,
                                       DistributedOptimizer& optimizer,
                                       OptimizerParamScheduler& scheduler,
                                       CheckpointConfig config)
    : world_(world),
      chunks_(std::move(chunks)),
      optimizer_(optimizer),
      scheduler_(scheduler),
      config_(std::move(config)) {}

std::vector<distckpt::LocalShard> TrainingCheckpoint::shards() const {
  auto all = optimizer_.sharded_state_dict();
  std::ranges::move(models::sharded_state_dict(chunks_), std::back_inserter(all));
  return all;
}

std::vector<at::Tensor> TrainingCheckpoint::tensors() const {
  auto all = optimizer_.own_state();
  for (const auto* const chunk : chunks_) {
    for (const auto& leaf : chunk->parameters().leaves()) all.push_back(leaf.value);
  }
  return all;
}

std::shared_ptr<const distckpt::Pickle> TrainingCheckpoint::common_state(
    const CallerState& caller) const {
  const auto of_ranks = models::gather(chunks_.front()->mesh().all(), caller.of_rank);
  PickleWriter pickle;
  pickle.begin_dict();
  if (config_.origin != nullptr && config_.origin->common) {
    if (const auto args = converter::find_args(distckpt::common_dict(*config_.origin->common))) {
      pickle.string("args");
      distckpt::write_value(pickle, *args);
    }
  }
  write_scheduler(pickle, scheduler_);
  pickle.string("optimizer");
  const auto write_optimizer = [&](bool expert) {
    pickle.begin_dict().string("optimizer").begin_dict().string("param_groups").begin_list();
    write_group(pickle, scheduler_, optimizer_, expert, 1.0);
    if (!expert)
      write_group(pickle, scheduler_, optimizer_, expert, 0.0);  // experts have no vectors
    pickle.end_list().end_dict().end_dict();
  };
  if (chunks_.front()->config().num_moe_experts == 0) {
    write_optimizer(false);
  } else {
    pickle.begin_dict().integer(0);
    write_optimizer(false);
    pickle.integer(1);
    write_optimizer(true);
    pickle.end_dict();
  }
  const auto state = optimizer_.state();
  pickle.string(kOwnEntry).begin_dict();
  pickle.string("num_skipped").integer(state.num_skipped);
  if (state.scaler) {
    pickle.string("loss_scale").real(state.scaler->scale);
    pickle.string("growth_tracker").integer(state.scaler->growth_tracker);
    pickle.string("hysteresis_tracker").integer(state.scaler->hysteresis_tracker);
  }
  pickle.string("shared").begin_dict();
  for (const auto& [key, value] : caller.shared) pickle.string(key).string(value);
  pickle.end_dict();
  pickle.string("of_ranks").begin_list();
  for (const auto& text : of_ranks) pickle.string(text);
  pickle.end_list().end_dict().end_dict();
  return std::make_shared<const distckpt::Pickle>(distckpt::Pickle::parse(
      pickle.finish(),
      {.source = "the training run", .allowed_globals = distckpt::object_globals()}));
}

converter::SaveReport TrainingCheckpoint::write(
    const models::ProcessGroup& ranks,
    std::int64_t iteration,
    std::vector<distckpt::LocalShard> shards,
    std::shared_ptr<const distckpt::Pickle> common) const {
  const auto group = converter::rank_group(ranks);
  const auto layout = distckpt::gather_mesh_layout(group, std::move(shards));
  const auto memory = models::make_memory_source(layout.layout);
  const auto& model = *chunks_.front();
  auto report = converter::save(group, layout, *memory,
                                {.config = model.config(),
                                 .to = config_.root,
                                 .iteration = {iteration},
                                 .parallel = model.mesh().shape().parallel(),
                                 .origin = config_.origin,
                                 .common = std::move(common),
                                 .overwrite = true,  // what a run left that was stopped here
                                 .threads = config_.threads,
                                 .staging = models::staging_memory()});
  distckpt::run_together(group, [&] {
    if (group.rank == 0) remove_superseded(config_, saved_iterations(config_.root));
  });
  return report;
}

converter::SaveReport TrainingCheckpoint::save(std::int64_t iteration, const CallerState& caller) {
  (void)finish_save();
  return write(chunks_.front()->mesh().all(), iteration, shards(), common_state(caller));
}

void TrainingCheckpoint::save_in_background(std::int64_t iteration, const CallerState& caller) {
  (void)finish_save();
  if (!background_ranks_) {
    background_ranks_ = std::make_unique<models::ProcessGroup>(
        world_, config_.name + "/save", chunks_.front()->mesh().all().ranks());
  }
  background_ =
      std::async(std::launch::async, [this, iteration, common = common_state(caller),
                                      copies = snapshot_.take(tensors(), shards())]() mutable {
        models::set_device(world_.device());
        return write(*background_ranks_, iteration, std::move(copies), std::move(common));
      });
}

std::optional<converter::SaveReport> TrainingCheckpoint::finish_save() {
  if (!background_.valid()) return std::nullopt;
  return background_.get();
}

bool TrainingCheckpoint::save_has_ended() const {
  return background_.valid() &&
         background_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
}

Resumed TrainingCheckpoint::load(std::optional<std::int64_t> iteration) {
  const auto group = converter::rank_group(chunks_.front()->mesh().all());
  Resumed resumed;
  DistributedOptimizer::State state;
  const auto layout = distckpt::gather_mesh_layout(group, shards());
  distckpt::run_together(group, [&] {
    converter::OpenOptions options{.hf_config = config_.hf_config, .training_state = true};
    if (iteration) options.iteration = distckpt::Iteration{*iteration};
    const auto checkpoint = converter::open(config_.root, options);
    require(checkpoint.training.has_value() && !checkpoint.training->param_groups.empty(),
            ErrorKind::kLayout, "{}: holds no training run, only a model",
            checkpoint.location.folder.string());
    const auto& model = *chunks_.front();
    require_same_tower(checkpoint,
                       model.options().vision_tower && model.config().computes_vision());
    const auto memory = models::make_memory_sink(layout.layout);
    (void)converter::load(checkpoint, layout, *memory,
                          {.config = chunks_.front()->config(),
                           .round = optimizer_.has_bf16_moments(),
                           .keep_padding = true,
                           .threads = config_.threads});
    const auto common = distckpt::common_dict(*checkpoint.common);
    resumed.iteration = entry(common, "iteration", checkpoint).as_int();
    const auto groups = checkpoint.training->param_groups.front().at("param_groups");
    state.num_steps = groups[0].at("step").as_int();
    scheduler_.load(entry(common, "opt_param_scheduler", checkpoint).at("num_steps").as_int());
    const auto own = common.find(kOwnEntry);
    if (!own) return;  // another program's
    state.num_skipped = own->at("num_skipped").as_int();
    if (own->find("loss_scale")) {
      state.scaler = {
          .scale = own->at("loss_scale").as_float(),
          .growth_tracker = static_cast<int>(own->at("growth_tracker").as_int()),
          .hysteresis_tracker = static_cast<int>(own->at("hysteresis_tracker").as_int())};
    }
    for (const auto& [key, value] : own->at("shared").items())
      resumed.caller.shared.emplace(key.as_string(), value.as_string());
    const auto of_ranks = own->at("of_ranks");
    resumed.same_ranks = of_ranks.size() == static_cast<std::size_t>(group.size);
    if (resumed.same_ranks)
      resumed.caller.of_rank = of_ranks[static_cast<std::size_t>(group.rank)].as_string();
  });
  optimizer_.load(state);
  return resumed;
}

std::vector<std::int64_t> saved_iterations(const fs::path& root) {
  std::vector<std::int64_t> iterations;
  std::error_code error;  // no such folder
  for (const auto& folder : fs::directory_iterator(root, error)) {
    const auto parsed = distckpt::parse_iteration_folder(folder.path().filename().string());
    if (parsed && parsed->number) iterations.push_back(*parsed->number);
  }
  std::ranges::sort(iterations);
  return iterations;
}

void publish_resumed(const CheckpointConfig& config, std::int64_t step) {
  std::vector<fs::path> hidden;
  std::vector<std::int64_t> unfinished;  // an iteration's working folder is left
  for (const auto& entry : fs::directory_iterator(config.root)) {
    const auto name = entry.path().filename().string();
    if (hidden_iteration(name, kHidden)) hidden.push_back(entry.path());
    const auto working = hidden_iteration(name, ".ferry");
    if (working && *working < step) unfinished.push_back(*working);
  }
  for (const auto& folder : hidden) fs::remove_all(folder);
  for (const auto iteration : unfinished) {
    try {  // its end removes it
      const distckpt::WorkFolder leftover(config.root / distckpt::iteration_folder({iteration}),
                                          /*resume=*/false);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kUsage) throw;  // else another's
    }
  }
  const auto folder = config.root / distckpt::iteration_folder({step});
  const distckpt::WorkFolder work(folder, /*resume=*/false);
  distckpt::PublishedModes modes;
  modes.narrow_all(folder);
  work.replace_beside(distckpt::kTracker, distckpt::iteration_text({step}), modes.file);
  auto saved = saved_iterations(config.root);
  std::erase_if(saved, [&](std::int64_t iteration) { return iteration > step; });
  remove_superseded(config, std::move(saved));
}

void require_none_newer(const fs::path& root, std::int64_t step) {
  const auto saved = saved_iterations(root);
  if (saved.empty() || saved.back() <= step) return;
  throw Error(
      ErrorKind::kUsage,
      fmt::format("{}: has a checkpoint of step {}, and this run would begin behind step {}",
                  root.string(), saved.back(), step),
      "choose another trainer.default_local_dir, go on from that checkpoint with "
      "checkpoint.resume_mode=auto, or move it away");
}

int kept_of_roles(int keep_last, std::size_t num_roles) {
  return num_roles > 1 && keep_last > 0 ? std::max(keep_last, 2) : keep_last;
}

std::vector<std::int64_t> superseded(std::vector<std::int64_t> iterations,
                                     int keep_last,
                                     std::int64_t keep_every) {
  if (keep_last <= 0) return {};
  std::ranges::sort(iterations);
  const auto latest = std::min(iterations.size(), static_cast<std::size_t>(keep_last));
  iterations.resize(iterations.size() - latest);
  std::erase_if(iterations, [&](std::int64_t iteration) {
    return keep_every > 0 && iteration % keep_every == 0;
  });
  return iterations;
}

}  // namespace ferry::trainer
