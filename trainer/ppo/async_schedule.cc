#include "trainer/ppo/async_schedule.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/integers.h"

namespace ferry::trainer {

AsyncSchedule::AsyncSchedule(const PpoConfig& config,
                             std::function<bool(std::int64_t)> is_saved,
                             std::int64_t step,
                             std::int64_t total_steps)
    : sync_step_(config.async_training.trigger_parameter_sync_step),
      ahead_(config.batches_ahead()),
      train_batch_size_(config.data.train_batch_size),
      gen_batch_size_(config.async_training.partial_rollout ? config.data.gen_batch_size.value()
                                                            : 0),
      is_saved_(std::move(is_saved)),
      total_steps_(total_steps),
      begin_(step),
      step_(step) {}

void AsyncSchedule::begin_step(std::int64_t step) {
  step_ = step;
  if (step - 1 > begin_ && is_saved_(step - 1)) begin_ = step - 1;
}

bool AsyncSchedule::syncs_weights() const {
  return (step_ - 1 - begin_) % sync_step_ == 0;
}

// Between two transfers of weights as many batches are answered as are learned from, so that there
// are always `ahead_` over when the next comes.
std::int64_t AsyncSchedule::last_batch() const {
  const auto step = step_ - begin_;
  const auto interval = distckpt::round_up(step, sync_step_);
  auto last = begin_ + std::min(interval + ahead_, step + std::max<std::int64_t>(ahead_, 1));
  if (gen_batch_size_ > 0) last = std::min(last, step_ + 1);
  return std::min(last, std::max(total_steps_, step_));
}

std::int64_t AsyncSchedule::prompts_until(std::int64_t batch) const {
  const auto more = batch >= total_steps_ ? 0 : gen_batch_size_ - train_batch_size_;
  return batch * train_batch_size_ + more;
}

}  // namespace ferry::trainer
