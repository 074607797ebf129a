#include "trainer/sft/sft_trainer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/storage/file_io.h"
#include "models/device/device.h"
#include "models/distributed/messages.h"
#include "models/spec/costs.h"
#include "trainer/engine/finite_outputs.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/out_of_memory.h"
#include "trainer/engine/peak_memory.h"
#include "trainer/engine/run_options.h"
#include "trainer/metrics/performance.h"
#include "trainer/plan/run_setup.h"
#include "trainer/run/run_start.h"
#include "trainer/run/training_run.h"

namespace ferry::trainer {
namespace {

// Numbers of each rank, summed in the order of the ranks.
std::vector<double> sum_over(const models::ProcessGroup& group, const std::vector<double>& mine) {
  std::vector<double> sums(mine.size(), 0.0);
  for (const auto& theirs : models::gather(group, mine)) {
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] += theirs[i];
  }
  return sums;
}

MegatronEngineOptions engine_options(const SftConfig& config,
                                     std::shared_ptr<const converter::Checkpoint> origin,
                                     std::int64_t total_steps) {
  return {.role = Role::kActor,
          .origin = std::move(origin),
          .model = config.model,
          .engine = config.engine,
          .memory = memory_settings(config),
          .training = MegatronEngineOptions::Training{
              .optimizer = optimizer_config(config.engine, config.optim),
              .scheduler = scheduler_config(config.optim, total_steps),
              .checkpoint = {.root = config.trainer.default_local_dir,
                             .keep_last = config.checkpoint.keep_last.value_or(0),
                             .keep_every = config.checkpoint.keep_every.value_or(0)}}};
}

}  // namespace

struct SftTrainer::Batch {
  std::vector<models::SequencePartition> parts{};  // micro-batches
  std::vector<at::Tensor> labels{}, weights{};     // of each, this rank's part
  std::vector<Partition> sequences{};              // of each, into those of this rank
  VisualInputs visual{};                           // of these
  std::int64_t learned = 0;                        // tokens of all data parallel ranks
  std::int64_t unlearned_rows = 0;                 // of these, rows without such a token
  std::vector<std::int64_t> seqlens{};             // of all data parallel ranks
  std::vector<std::int64_t> tokens_of_ranks{};

  std::int64_t tokens() const {
    return std::accumulate(tokens_of_ranks.begin(), tokens_of_ranks.end(), std::int64_t{0});
  }
};

SftTrainer::SftTrainer(const SftConfig& config, models::World& world, SftOutput output)
    : world_(world),
      output_(std::move(output)),
      origin_(open_checkpoint(config.model)),
      planned_(planned(config, *origin_, world, output_.say)),
      config_(planned_.config),
      encoder_(tokenizer_folder(config.model, *origin_), config.data, origin_->map.config),
      stream_(open_training_records(config.data, config.trainer, parser())),
      length_(run_length(config.trainer,
                         config.checkpoint.save_freq,
                         "data.train_batch_size",
                         config.data.train_batch_size,
                         [&] { return count_records(world, stream_, parser()); })),
      engine_(world, engine_options(config_, origin_, length_.steps)),
      mesh_(engine_.mesh()),
      vision_(encoder_.image_reader() ? engine_.make_vision_encoder(encoder_.image_reader()->config)
                                      : nullptr),
      gpu_(find_device(models::device_name(world.device()))),
      profiler_(config.global_profiler, config.profiler, world.rank()) {
  require(config.data.train_batch_size % mesh_.shape().dp() == 0, ErrorKind::kUsage,
          "data.train_batch_size of {} is no multiple of the {} data parallel ranks",
          config.data.train_batch_size, mesh_.shape().dp());
  say(fmt::format("loaded     {} in {:.1f} s", config_.model.path, engine_.seconds_to_load()));
  resume();
  record_ = std::make_unique<RunRecord>(config.trainer, world.rank(), step_, length_.steps,
                                        to_toml(config_), output_.say);
  if (world.rank() == 0)
    distckpt::write_text(std::filesystem::path(config.trainer.default_local_dir) / kPlanFile,
                         planned_.text);
}

SftTrainer::~SftTrainer() = default;

void SftTrainer::resume() {
  const auto start = run_start(config_.checkpoint, config_.trainer.default_local_dir, {""});
  goes_on_ = goes_on(start, config_.trainer.default_local_dir);
  if (start.step == 0) return;
  const auto resumed = start.root.empty() ? engine_.checkpoint().load(start.step)
                                          : engine_.checkpoint_at(start.root).load(start.step);
  step_ = resumed.iteration;
  stream_.restore(Record::parse(resumed.caller.shared.at("data")));
  if (is_rank_0())
    finish_resumed_save(start, config_.checkpoint, config_.model, config_.trainer.default_local_dir,
                        {""});
  mesh_.all().barrier();
  say(fmt::format("resumed    after step {}", step_));
}

std::function<Conversation(const Record&)> SftTrainer::parser() const {
  return [this](const Record& record) {
    auto conversation = parse_conversation(record, config_.data);
    encoder_.require_seen(conversation);
    return conversation;
  };
}

std::vector<Conversation> SftTrainer::next_conversations(RecordStream& records) const {
  auto conversations = records.next_batch(config_.data.train_batch_size, parser());
  for (const auto& row : records.newly_malformed())
    say(fmt::format("skipped    {}", row.describe()));
  return conversations;
}

SftTrainer::Batch SftTrainer::make_batch(const std::vector<Conversation>& conversations,
                                         const std::vector<std::string>& places,
                                         std::size_t num_rows) const {
  const auto dp = mesh_.shape().dp();
  std::vector<at::Tensor> tokens;
  std::vector<at::Tensor> scored;  // where something is learned
  std::vector<SftTensors> examples;
  std::vector<std::int64_t> seqlens;
  Batch batch;
  const auto mine = shard_of(conversations, mesh_.coordinates().dp, dp);
  const auto places_of_mine = shard_of(places, mesh_.coordinates().dp, dp);
  const auto first = static_cast<std::size_t>(mine.data() - conversations.data());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    const auto example = first + i >= num_rows
                             ? SftExample{.tokens = {0}, .learned = {false}}
                             : with_context([&] { return "reading " + places_of_mine[i]; },
                                            [&] { return encoder_.encode(mine[i]); });
    examples.push_back(tensors_of(example));
    batch.visual.sequences.push_back(example.visual);
    tokens.push_back(examples.back().tokens);
    scored.push_back(examples.back().weights.ne(0));
    seqlens.push_back(examples.back().tokens.size(0));
    const auto learned = static_cast<std::int64_t>(examples.back().weights.sum().item<double>());
    batch.learned += learned;
    if (first + i < num_rows && learned == 0) ++batch.unlearned_rows;
  }
  const auto all = gather_seqlens(mesh_.dp(), seqlens);
  for (const auto& of_rank : all) {
    batch.seqlens.insert(batch.seqlens.end(), of_rank.begin(), of_rank.end());
    batch.tokens_of_ranks.push_back(
        std::accumulate(of_rank.begin(), of_rank.end(), std::int64_t{0}));
  }
  const auto size = config_.micro_batches();
  const auto parts = engine_.micro_batches(
      seqlens, size, size.max_token_len(mesh_.shape().cp(), config_.data.max_length));
  batch.parts = pack_micro_batches(tokens, parts, mesh_, scored, {}, batch.visual.sequences);
  batch.visual.vision = vision_.get();
  batch.sequences = parts;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::vector<at::Tensor> labels;
    std::vector<at::Tensor> weights;
    for (const auto index : parts[i]) {
      labels.push_back(examples[index].labels);
      weights.push_back(examples[index].weights);
    }
    batch.labels.push_back(batch.parts[i].local(at::cat(labels)));
    batch.weights.push_back(batch.parts[i].local(at::cat(weights)));
  }
  const auto sums = sum_over(
      mesh_.dp(), {static_cast<double>(batch.learned), static_cast<double>(batch.unlearned_rows)});
  batch.learned = static_cast<std::int64_t>(sums[0]);
  batch.unlearned_rows = static_cast<std::int64_t>(sums[1]);
  return batch;
}

double SftTrainer::run_batch(const Batch& batch,
                             bool forward_only,
                             const models::Observer& observe) {
  const double scale = 1.0 / static_cast<double>(std::max<std::int64_t>(batch.learned, 1));
  const LossFunction loss = [&](const models::GPTModel& model, const at::Tensor& hidden,
                                std::size_t i) -> LossOutput {
    const auto result = model.cross_entropy(hidden, batch.labels[i], batch.weights[i] * scale,
                                            batch.parts[i].scored());
    return {.loss = result.loss, .metrics = {{"loss", result.loss.detach()}}};
  };
  const auto metrics = forward_backward(
      engine_.pipeline(forward_only), batch.parts, loss,
      {.forward_only = forward_only,
       .grad_scale = engine_.optimizer().loss_scale(),
       .observe = observe,
       .visual = visual_function(batch.visual, engine_.chunks(), batch.parts, batch.sequences)});
  double mine = 0;
  // Tensor parallel ranks have the same loss.
  if (mesh_.is_last_stage() && mesh_.coordinates().tp == 0) {
    for (const auto& of_micro_batch : metrics) mine += of_micro_batch.at("loss").item<double>();
  }
  const auto sums =
      sum_over(mesh_.all(), {mine, engine_.checkpoint().save_has_ended() ? 1.0 : 0.0});
  save_has_ended_ = sums[1] > 0;
  return sums[0];
}

void SftTrainer::count_unlearned(const Batch& batch) {
  constexpr std::int64_t kMost = 10;
  constexpr const char* kWhy = "data.truncation has cut off what the assistant says";
  const bool learns = batch.learned > 0;
  steps_without_learning_ = learns ? 0 : steps_without_learning_ + 1;
  if (!learns) say(fmt::format("step {}: no row has a token to learn; nothing was updated", step_));
  if (batch.unlearned_rows > 0 && !std::exchange(has_said_unlearned_, true))
    say(fmt::format(
        "note       {} rows of step {} have no token to learn (train/unlearned_rows): {}",
        batch.unlearned_rows, step_, kWhy));
  require(steps_without_learning_ < std::min(kMost, length_.steps), ErrorKind::kCorrupt,
          "data.max_length of {}: no row of {} steps in a row has a token to learn: {}",
          config_.data.max_length, steps_without_learning_, kWhy);
}

// The parameters are as they were: where the loss already is not finite, once more forward shows
// where that began.
void SftTrainer::say_not_finite(const Batch& batch, double loss, const StepReport& update) {
  FiniteOutputs outputs;
  if (!std::isfinite(loss)) (void)run_batch(batch, true, outputs.observer());
  const auto module = outputs.first(mesh_.all());
  const auto what = module.empty() ? fmt::format("the gradient of {}", update.not_finite)
                                   : fmt::format("the output of {}, and so the loss,", module);
  say(fmt::format("step {}: {} is not finite; nothing was updated ({} so far)", step_, what,
                  update.skipped));
}

Metrics SftTrainer::train_step() {
  const auto started = steady_time();
  const auto device = world_.device();
  models::reset_peak_memory(device);
  record_->timeline().begin_step(step_ + 1);
  profiler_.begin_step(step_ + 1);
  const auto task = [&](const char* name, const auto& body) {
    const auto span = record_->timeline().span(name);
    profiler_.begin_task(step_ + 1, name);
    body();
    profiler_.end_task();
  };
  Batch batch;
  double loss = 0;
  StepReport update;
  const auto rates = engine_.scheduler().now();
  task("load_data", [&] {
    const auto conversations = next_conversations(stream_);
    batch = make_batch(conversations, stream_.places(), conversations.size());
  });
  const bool learns = batch.learned > 0;
  if (learns) {
    task("forward_backward", [&] {
      engine_.optimizer().zero_grad();
      loss = run_batch(batch, false);
    });
    task("optimizer", [&] { update = engine_.optimizer_step(); });
  }
  profiler_.end_step(step_ + 1);
  engine_.scheduler().step(1);
  ++step_;
  count_unlearned(batch);
  if (learns) {
    if (!update.update_successful) say_not_finite(batch, loss, update);
    not_finite_.add(update.not_finite, engine_.optimizer().loss_scale() != 1);
  }
  const auto memory = peak_memory(mesh_.all(), device);
  const auto timing = record_->timeline().end_step();
  Metrics metrics = performance_metrics({.seconds = steady_time() - started,
                                         .tokens = batch.tokens(),
                                         .num_gpus = world_.size(),
                                         .max_memory_allocated = memory.allocated,
                                         .max_memory_reserved = memory.reserved,
                                         .cpu_memory_used = host_memory_used(),
                                         .timing = timing});
  if (gpu_ && learns)
    metrics["train/mfu"] =
        models::training_flops(engine_.config(), batch.seqlens) /
        ((timing.at("forward_backward") + timing.at("optimizer")) * gpu_->flops * world_.size());
  metrics.merge(seqlen_metrics(batch.tokens_of_ranks));
  if (learns) {
    metrics.insert(engine_.balance_metrics().begin(), engine_.balance_metrics().end());
    metrics["train/loss"] = loss;
    metrics["train/grad_norm"] = update.grad_norm;
  }
  metrics["train/lr"] = rates.lr;
  metrics["train/unlearned_rows"] = static_cast<double>(batch.unlearned_rows);
  metrics["train/global_tokens"] = static_cast<double>(batch.tokens());
  metrics["train/skipped"] = static_cast<double>(engine_.optimizer().num_skipped());
  if (engine_.optimizer().config().loss_scale)
    metrics["train/loss_scale"] = engine_.optimizer().loss_scale();
  metrics["train/malformed_rows"] = static_cast<double>(stream_.malformed().count);
  return metrics;
}

Metrics SftTrainer::validate() {
  auto records = open_records(config_.data, config_.trainer, /*training=*/false);
  double loss = 0;
  double learned = 0;
  const OffloadFlags resting{.grad = config_.engine.grad_offload.value_or(false)};
  engine_.offload().to_host(resting);
  while (records.cursor().epoch == 0) {
    auto conversations = next_conversations(records);
    if (conversations.empty()) continue;
    const auto num_rows = conversations.size();
    auto places = records.places();
    const auto padded = static_cast<std::size_t>(distckpt::round_up(
        static_cast<std::int64_t>(num_rows), engine_.batch_unit(config_.micro_batches())));
    conversations.resize(padded);
    places.resize(padded);
    const auto batch = make_batch(conversations, places, num_rows);
    const auto weight = static_cast<double>(batch.learned);
    loss += weight * run_batch(batch, true);
    learned += weight;
  }
  engine_.offload().to_device(resting);
  return {{"val/loss", learned > 0 ? loss / learned : std::nan("")},
          {"val/malformed_rows", static_cast<double>(records.malformed().count)}};
}

void SftTrainer::finish_save() {
  if (engine_.checkpoint().finish_save()) export_hf();
}

void SftTrainer::save() {
  finish_save();
  const CallerState caller{.shared = {{"data", stream_.state().dump()}}, .of_rank = ""};
  engine_.save(step_, caller, config_.checkpoint.async_save);
  if (!config_.checkpoint.async_save) export_hf();
  say(fmt::format("saved      step {} to {}", step_, config_.trainer.default_local_dir));
}

void SftTrainer::export_hf() const {
  if (!config_.checkpoint.save_hf) return;
  if (is_rank_0()) save_hf(config_.trainer.default_local_dir, config_.model.hf_config_path);
  mesh_.all().barrier();
}

void SftTrainer::expect_memory() const {
  const auto mine = engine_.memory().expect(/*forward_only=*/false, room(world_.device()));
  const auto notes =
      gather_notes(mesh_.all(), mine.empty() ? std::vector<std::string>() : std::vector{mine});
  for (const auto& note : notes) say("memory     " + note);
}

bool SftTrainer::is_due(const Frequency& frequency, bool also_at_last) const {
  return frequency.comes_behind(step_, length_.steps_per_epoch) ||
         (also_at_last && step_ == length_.steps);
}

void SftTrainer::run() {
  // A run that goes on in its own folder has done it when it began.
  if (config_.trainer.val_before_train && !goes_on_) record_->write(step_, validate());
  expect_memory();
  while (step_ < length_.steps) {
    auto metrics = train_step();
    if (is_due(config_.trainer.test_freq, !config_.data.val_files.empty()))
      metrics.merge(validate());
    record_->write(step_, metrics);
    if (save_has_ended_) finish_save();  // tells of a save that failed without waiting for the next
    record_->show(step_, metrics);
    if (is_due(config_.checkpoint.save_freq, config_.checkpoint.save_freq != Frequency{0})) save();
  }
  finish_save();
  record_->finish();
}

}  // namespace ferry::trainer
