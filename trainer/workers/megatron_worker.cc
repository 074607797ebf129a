#include "trainer/workers/megatron_worker.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"

namespace ferry::trainer {

MegatronWorker::MegatronWorker(models::World& world,
                               MegatronEngineOptions options,
                               OffloadFlags resting)
    : world_(world),
      engine_(std::make_unique<MegatronEngine>(world, std::move(options))),
      resting_(resting) {
  engine_->offload().to_host(resting_);
}

void MegatronWorker::see(const PromptEncoder& encoder) {
  const auto& own = engine_->chunks().front()->config().vision;
  const auto& reader = encoder.image_reader();
  if (!own || !reader) return;
  const auto& images = reader->config;
  require(images.patch_size == own->patch_size &&
              images.temporal_patch_size == own->temporal_patch_size &&
              images.merge_size == own->spatial_merge_size,
          ErrorKind::kUsage, "{}: its vision tower takes other patches than the actor's",
          name_of(engine_->options().role));
  prompts_ = &encoder;
  vision_ = engine_->make_vision_encoder(images);
}

VisualInputs MegatronWorker::visual_inputs(const RolloutBatch& batch) const {
  if (std::ranges::all_of(batch.images, [](const auto& of_row) { return of_row.empty(); }))
    return {};
  require(vision_ != nullptr, ErrorKind::kUsage,
          "{}: prompts have images, which its model does not see",
          name_of(engine_->options().role));
  VisualInputs inputs{.vision = vision_.get()};
  for (std::int64_t row = 0; row < batch.size(); ++row)
    inputs.sequences.push_back(
        prompts_->visual_prompt(batch.images[static_cast<std::size_t>(row)], batch.prompt(row)));
  return inputs;
}

MegatronWorker::Awake::Awake(const MegatronWorker& worker, OffloadFlags needed)
    : offload_(worker.engine_->offload()),
      which_{.param = needed.param && worker.resting_.param,
             .grad = needed.grad && worker.resting_.grad} {
  offload_.to_device(which_);
}

MegatronWorker::Awake::~Awake() {
  offload_.to_host(which_);
}

std::vector<Partition> MegatronWorker::micro_batches(const RolloutBatch& batch,
                                                     const MicroBatchSize& size,
                                                     std::int64_t longest_sequence) const {
  return engine_->micro_batches(batch.lengths(), size,
                                size.max_token_len(engine_->mesh().shape().cp(), longest_sequence));
}

std::vector<Partition> MegatronWorker::padded_micro_batches(const RolloutBatch& batch,
                                                            const MicroBatchSize& size,
                                                            std::int64_t longest_sequence) const {
  const auto& shape = engine_->mesh().shape();
  auto lengths = batch.lengths();
  const auto unit = static_cast<std::size_t>(engine_->batch_unit(size) / shape.dp());
  lengths.resize(distckpt::round_up(lengths.size(), unit), 1);
  return engine_->micro_batches(lengths, size, size.max_token_len(shape.cp(), longest_sequence));
}

UpdateOutput MegatronWorker::update(
    const RolloutBatch& batch,
    const MiniBatches& mini_batches,
    const std::function<std::map<std::string, double>(const RolloutBatch&, double)>& learn) {
  const auto role = name_of(engine_->options().role);
  const auto dp = engine_->mesh().shape().dp();
  const auto rows = batch.size();
  const auto size = mini_batches.size / dp;
  require(mini_batches.size % dp == 0 && rows % size == 0, ErrorKind::kUsage,
          "{}: {} answers on each of {} data parallel ranks are no multiple of a mini-batch of {} "
          "answers",
          role, rows, dp, mini_batches.size);
  UpdateOutput output;
  double updates = 0, skipped = 0;
  const Awake awake(*this, {.param = true, .grad = true});
  for (int epoch = 0; epoch < (mini_batches.shuffle ? 1 : mini_batches.epochs); ++epoch) {
    for (std::int64_t begin = 0; begin < rows; begin += size) {
      engine_->optimizer().zero_grad();
      auto metrics = learn(batch.slice(begin, begin + size), engine_->optimizer().loss_scale());
      if (metrics.empty()) {
        ++skipped;
        continue;
      }
      const auto report = engine_->optimizer_step();
      metrics[role + "/grad_norm"] = report.grad_norm;
      for (const auto& [name, value] : engine_->balance_metrics())
        metrics[fmt::format("{}/{}", role, name)] = value;
      if (!report.update_successful) {
        ++skipped;
        output.not_finite = report.not_finite;
      }
      for (const auto& [name, value] : metrics) output.metrics[name] += value;
      ++updates;
    }
  }
  for (auto& [name, sum] : output.metrics) sum /= updates;  // without updates there are none
  output.metrics[role + "/lr"] = engine_->scheduler().lr();
  engine_->scheduler().step(1);
  if (skipped > 0) output.metrics[role + "/skipped"] = skipped;
  output.loss_scale = engine_->optimizer().loss_scale();
  if (engine_->optimizer().config().loss_scale)
    output.metrics[role + "/loss_scale"] = output.loss_scale;
  output.max_memory = peak_memory(engine_->mesh().all(), world_.device());
  return output;
}

void MegatronWorker::save_checkpoint(std::int64_t step,
                                     const std::map<std::string, std::string>& caller,
                                     bool async) {
  const Awake awake(*this, {.param = true});
  engine_->save(step, {.shared = caller}, async);
}

bool MegatronWorker::finish_save(bool wait) {
  auto& checkpoint = engine_->checkpoint();
  return (wait || checkpoint.save_has_ended()) && checkpoint.finish_save().has_value();
}

std::map<std::string, std::string> MegatronWorker::load_checkpoint(std::int64_t step,
                                                                   const std::string& root) {
  const Awake awake(*this, {.param = true});
  const auto resumed =
      root.empty() ? engine_->checkpoint().load(step) : engine_->checkpoint_at(root).load(step);
  return resumed.caller.shared;
}

}  // namespace ferry::trainer
