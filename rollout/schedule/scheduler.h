// Which tokens of which sequences the next step computes: those that run go on, first come first
// served, then those that wait begin, as far as tokens, sequences and blocks allow. A prompt may
// take several steps beside others' decoding (chunked prefill). Where blocks run out, the sequence
// that came last gives up its own and waits in front, to be computed again (nano-vllm's Scheduler,
// with vLLM's one budget for prompts and decoding).
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "rollout/schedule/block_manager.h"
#include "rollout/schedule/sequence.h"

namespace ferry::rollout {

struct ScheduledSequence {
  Sequence* sequence = nullptr;
  std::int64_t num_new_tokens = 0;  // behind its num_computed_tokens
};

struct SchedulerOptions {
  std::int64_t max_num_seqs = 256;
  std::int64_t max_num_batched_tokens = 8192;
  bool enable_chunked_prefill = true;
};

class Scheduler {
 public:
  // Throws Error(kUsage) unless every running sequence can have a token in a step.
  Scheduler(SchedulerOptions options, BlockManager& blocks);

  // Behind all that wait. The sequence outlives its stay here.
  void add(Sequence& sequence);
  // Takes a sequence out, finished or not, and gives its blocks back.
  void remove(Sequence& sequence);
  // Those with one new token first, the others behind them; each has its blocks. Empty only if
  // there is nothing to do but to wait for tokens that are under way.
  std::vector<ScheduledSequence> schedule();
  // Everything that runs waits again, in its order, and is computed anew.
  void preempt_all();

  bool has_unfinished() const { return !waiting_.empty() || !running_.empty(); }
  std::int64_t num_waiting() const { return static_cast<std::int64_t>(waiting_.size()); }
  std::int64_t num_running() const { return static_cast<std::int64_t>(running_.size()); }
  std::int64_t num_preemptions() const { return num_preemptions_; }

 private:
  void preempt_last();
  bool schedule_running(std::vector<ScheduledSequence>& step, std::int64_t& budget);
  void schedule_waiting(std::vector<ScheduledSequence>& step, std::int64_t& budget);

  SchedulerOptions options_;
  BlockManager& blocks_;
  std::deque<Sequence*> waiting_;
  std::vector<Sequence*> running_;
  std::int64_t num_preemptions_ = 0;
};

}  // namespace ferry::rollout
