#include "trainer/workers/megatron_worker.h"

#include <map>
#include <numeric>
#include <utility>

#include "distckpt/base/error.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/peak_memory.h"

namespace ferry::trainer {

MegatronWorker::MegatronWorker(models::World& world,
                               MegatronEngineOptions options,
                               OffloadFlags resting)
    : world_(world),
      engine_(std::make_unique<MegatronEngine>(world, std::move(options))),
      resting_(resting) {
  engine_->offload().to_host(resting_);
}

MegatronWorker::Awake::Awake(const MegatronWorker& worker, OffloadFlags needed)
    : offload_(worker.engine_->offload()),
      which_{.param = needed.param && worker.resting_.param,
             .grad = needed.grad && worker.resting_.grad,
             .optimizer = needed.optimizer && worker.resting_.optimizer} {
  offload_.to_device(which_);
}

MegatronWorker::Awake::~Awake() {
  offload_.to_host(which_);
}

std::vector<Partition> MegatronWorker::micro_batches(const std::vector<AnsweredPrompt>& answers,
                                                     const MicroBatchSize& size,
                                                     std::int64_t longest_sequence) const {
  if (!size.use_dynamic_bsz)
    return split_micro_batches(answers.size(),
                               static_cast<std::size_t>(size.micro_batch_size_per_gpu.value()));
  std::vector<std::int64_t> seqlens;
  for (const auto& answer : answers) seqlens.push_back(answer.tokens.size(0));
  const auto& mesh = engine_->mesh();
  return rearrange_micro_batches(
             gather_seqlens(mesh.dp(), seqlens),
             {.max_token_len = size.max_token_len(mesh.shape().cp(), longest_sequence),
              .num_batches_divided_by =
                  engine_->is_interleaved() ? static_cast<std::size_t>(mesh.shape().pp()) : 1})
      .at(static_cast<std::size_t>(mesh.coordinates().dp));
}

nlohmann::json MegatronWorker::update(
    std::int64_t rows,
    const MiniBatches& batches,
    const std::function<std::map<std::string, double>(const std::vector<std::int64_t>&, double)>&
        learn) {
  const auto& role = engine_->options().name;
  const auto dp = engine_->mesh().shape().dp();
  require(batches.size % dp == 0 && rows % (batches.size / dp) == 0, ErrorKind::kUsage,
          "{}: {} answers on each of {} data parallel ranks are no multiple of a mini-batch of {} "
          "answers",
          role, rows, dp, batches.size);
  const auto size = batches.size / dp;
  std::map<std::string, double> sums;
  double updates = 0;
  const Awake awake(*this, {.param = true, .grad = true});
  double skipped = 0;
  std::string not_finite;
  for (int epoch = 0; epoch < (batches.shuffle ? 1 : batches.epochs); ++epoch) {
    for (std::int64_t begin = 0; begin < rows; begin += size) {
      std::vector<std::int64_t> mine(static_cast<std::size_t>(size));
      std::iota(mine.begin(), mine.end(), begin);
      engine_->optimizer().zero_grad();
      auto metrics = learn(mine, engine_->optimizer().loss_scale());
      if (metrics.empty()) {
        ++skipped;
        continue;
      }
      const auto report = engine_->optimizer_step();
      metrics[role + "/grad_norm"] = report.grad_norm;
      if (!report.update_successful) {
        ++skipped;
        not_finite = report.not_finite;
      }
      for (const auto& [name, value] : metrics) sums[name] += value;
      ++updates;
    }
  }
  nlohmann::json means = nlohmann::json::object();
  for (const auto& [name, sum] : sums) means[name] = sum / updates;  // of none there are none
  means[role + "/lr"] = engine_->scheduler().lr();
  engine_->scheduler().step(1);
  if (skipped > 0) means[role + "/skipped"] = skipped;
  const auto memory = peak_memory(engine_->mesh().all(), world_.device());
  return {{"metrics", means},
          {"not_finite", not_finite},
          {"max_memory", {memory.allocated, memory.reserved}}};
}

DataProto MegatronWorker::save_checkpoint(const DataProto& call) {
  CallerState caller;
  for (const auto& [key, value] : call.meta_info.at("caller").items())
    caller.shared[key] = value.get<std::string>();
  const Awake awake(*this, {.param = true, .optimizer = true});
  const auto step = call.meta_info.at("global_step").get<std::int64_t>();
  if (call.meta_info.at("async").get<bool>())
    engine_->checkpoint().save_in_background(step, caller);
  else
    (void)engine_->checkpoint().save(step, caller);
  return {};
}

DataProto MegatronWorker::finish_save(const DataProto& call) {
  auto& checkpoint = engine_->checkpoint();
  DataProto answer;
  answer.meta_info["saved"] =
      (call.meta_info.at("wait").get<bool>() || checkpoint.save_has_ended()) &&
      checkpoint.finish_save().has_value();
  return answer;
}

DataProto MegatronWorker::load_checkpoint(const DataProto& call) {
  const Awake awake(*this, {.param = true, .optimizer = true});
  const auto step = call.meta_info.at("global_step").get<std::int64_t>();
  const auto root = call.meta_info.at("root").get<std::string>();
  const auto resumed =
      root.empty() ? engine_->checkpoint().load(step) : engine_->checkpoint_at(root).load(step);
  DataProto answer;
  answer.meta_info["caller"] = resumed.caller.shared;
  return answer;
}

}  // namespace ferry::trainer
