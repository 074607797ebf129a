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
  for (const auto& [sequence, num_new_tokens] : step)
    blocks_.keep_states(*sequence, sequence->num_computed_tokens + num_new_tokens);
  std::ranges::stable_partition(step, &ScheduledSequence::decodes);
  return step;
}

// The tokens of a sequence that the next step computes; 0: it waits for a step with more room.
std::int64_t Scheduler::tokens_of_step(const Sequence& sequence, std::int64_t budget) const {
  const auto begin = sequence.num_computed_tokens;
  auto end = std::min(sequence.size(), begin + budget);
  if (begin >= sequence.num_prefill_tokens) return end - begin;
  if (!sequence.kept_prefixes.empty()) end = std::min(end, sequence.kept_prefixes.front().tokens);
  if (end == sequence.size()) return end - begin;
  const auto block_size = blocks_.block_size();
  const auto whole = end / block_size * block_size;
  if (whole > begin) return whole - begin;
  const bool always_has_room =
      options_.max_num_batched_tokens >= options_.max_num_seqs + block_size;
  return always_has_room ? 0 : end - begin;
}

// Returns false if a running sequence was preempted.
bool Scheduler::schedule_running(std::vector<ScheduledSequence>& step, std::int64_t& budget) {
  const auto preemptions = num_preemptions_;
  for (std::size_t i = 0; i < running_.size() && budget > 0; ++i) {
    auto& sequence = *running_[i];
    if (sequence.is_complete) continue;
    const auto tokens = tokens_of_step(sequence, budget);
    if (tokens == 0) continue;
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
// preempted. One that waits for the states of its prefix keeps its place, and others begin.
void Scheduler::schedule_waiting(std::vector<ScheduledSequence>& step, std::int64_t& budget) {
  std::int64_t place = 0;
  while (place < num_waiting() && budget > 0 && num_running() + place < options_.max_num_seqs) {
    auto& sequence = *waiting_[static_cast<std::size_t>(place)];
    if (sequence.is_complete) return;  // leaves as soon as its last token is known
    if (!blocks_.take_cached_prefix(sequence)) {
      ++place;
      continue;
    }
    const auto remaining = sequence.size() - sequence.num_computed_tokens;
    const auto tokens = tokens_of_step(sequence, budget);
    const auto missing =
        blocks_.num_missing(sequence, sequence.size(), options_.max_num_batched_tokens);
    if (tokens == 0 || (tokens < remaining && !options_.enable_chunked_prefill) ||
        missing > blocks_.num_free_blocks()) {
      blocks_.deallocate(sequence);
      return;
    }
    blocks_.allocate(sequence, sequence.num_computed_tokens + tokens);
    sequence.status = SequenceStatus::kRunning;
    waiting_.erase(waiting_.begin() + place);
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
