#include "rollout/schedule/scheduler.h"

#include <algorithm>

#include "distckpt/base/error.h"

namespace ferry::rollout {

Scheduler::Scheduler(SchedulerOptions options, BlockManager& blocks)
    : options_(options), blocks_(blocks) {
  require(
      options_.max_num_seqs > 0 && options_.max_num_batched_tokens >= options_.max_num_seqs,
      ErrorKind::kUsage,
      "max_num_batched_tokens {} is below max_num_seqs {}: each sequence needs a token in a step",
      options_.max_num_batched_tokens, options_.max_num_seqs);
}

void Scheduler::add(Sequence& sequence) {
  sequence.status = SequenceStatus::kWaiting;
  waiting_.push_back(&sequence);
}

void Scheduler::remove(Sequence& sequence) {
  std::erase(running_, &sequence);
  std::erase(waiting_, &sequence);
  blocks_.deallocate(sequence);
  sequence.status = SequenceStatus::kFinished;
}

std::vector<ScheduledSequence> Scheduler::schedule() {
  std::vector<ScheduledSequence> step;
  auto budget = options_.max_num_batched_tokens;
  if (schedule_running(step, budget)) schedule_waiting(step, budget);
  std::ranges::stable_partition(
      step, [](const ScheduledSequence& one) { return one.num_new_tokens == 1; });
  return step;
}

// Returns false if a running sequence was preempted.
bool Scheduler::schedule_running(std::vector<ScheduledSequence>& step, std::int64_t& budget) {
  const auto preemptions = num_preemptions_;
  for (std::size_t i = 0; i < running_.size() && budget > 0; ++i) {
    auto& sequence = *running_[i];
    if (sequence.is_complete) continue;
    const auto tokens = std::min(sequence.size() - sequence.num_computed_tokens, budget);
    while (i < running_.size() &&
           !blocks_.allocate(sequence, sequence.num_computed_tokens + tokens))
      preempt_last();
    if (i == running_.size()) break;
    step.push_back({&sequence, tokens});
    budget -= tokens;
  }
  return preemptions == num_preemptions_;
}

// A sequence begins if there are blocks for all its tokens so far: otherwise it would soon be
// preempted.
void Scheduler::schedule_waiting(std::vector<ScheduledSequence>& step, std::int64_t& budget) {
  while (!waiting_.empty() && budget > 0 && num_running() < options_.max_num_seqs) {
    auto& sequence = *waiting_.front();
    if (sequence.is_complete) return;  // leaves as soon as its last token is known
    blocks_.take_cached_prefix(sequence);
    const auto remaining = sequence.size() - sequence.num_computed_tokens;
    const auto tokens = std::min(remaining, budget);
    const auto missing =
        blocks_.num_missing(sequence, sequence.size(), options_.max_num_batched_tokens);
    if ((tokens < remaining && !options_.enable_chunked_prefill) ||
        missing > blocks_.num_free_blocks()) {
      blocks_.deallocate(sequence);
      return;
    }
    blocks_.allocate(sequence, sequence.num_computed_tokens + tokens);
    sequence.status = SequenceStatus::kRunning;
    waiting_.pop_front();
    running_.push_back(&sequence);
    step.push_back({&sequence, tokens});
    budget -= tokens;
  }
}

void Scheduler::preempt_last() {
  auto& victim = *running_.back();
  running_.pop_back();
  blocks_.deallocate(victim);
  victim.status = SequenceStatus::kWaiting;
  ++victim.num_preemptions;
  ++num_preemptions_;
  waiting_.push_front(&victim);
}

void Scheduler::preempt_all() {
  while (!running_.empty()) preempt_last();
}

}  // namespace ferry::rollout
