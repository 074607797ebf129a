// Chooses the tokens that the next step computes: running sequences continue, first come first
// served, then waiting ones begin, as far as tokens, sequences and blocks allow. A prompt may take
// several steps beside others' decoding (chunked prefill). If blocks run out, the sequence that
// came last is preempted: it loses its blocks, waits in front, and is computed again (nano-vllm's
// Scheduler, with vLLM's one budget for prompts and decoding).
//
// A step that does not compute a prompt to its end computes it to the end of a block, if the model
// has states of linear attention: chunks of the delta rule then begin at the same tokens whatever
// else the steps compute (unless max_num_batched_tokens leaves no block beside max_num_seqs).
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "rollout/schedule/block_manager.h"
#include "rollout/schedule/sequence.h"

namespace ferry::rollout {

struct ScheduledSequence {
  Sequence* sequence = nullptr;
  std::int64_t num_new_tokens = 0;  // after its num_computed_tokens

  // Rows of prompts are chunks, even one that is left alone, if there are states of linear
  // attention: it then has the bits that it has behind other rows.
  bool decodes() const {
    return num_new_tokens == 1 && sequence->num_computed_tokens >= sequence->num_prefill_tokens;
  }
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

  // Appends a sequence to the waiting ones. It must outlive its time here.
  void add(Sequence& sequence);
  // Removes a sequence, finished or not, and frees its blocks.
  void remove(Sequence& sequence);
  // Returns sequences that decode, then the others, all with their blocks. Empty only if there is
  // nothing to compute before tokens of a step in flight are known.
  std::vector<ScheduledSequence> schedule();
  // Preempts all running sequences, which wait again in their order.
  void preempt_all();

  bool has_unfinished() const { return !waiting_.empty() || !running_.empty(); }
  std::int64_t num_waiting() const { return static_cast<std::int64_t>(waiting_.size()); }
  std::int64_t num_running() const { return static_cast<std::int64_t>(running_.size()); }
  std::int64_t num_preemptions() const { return num_preemptions_; }

 private:
  void preempt_last();
  std::int64_t tokens_of_step(const Sequence& sequence, std::int64_t budget) const;
  bool schedule_running(std::vector<ScheduledSequence>& step, std::int64_t& budget);
  void schedule_waiting(std::vector<ScheduledSequence>& step, std::int64_t& budget);

  SchedulerOptions options_;
  BlockManager& blocks_;
  std::deque<Sequence*> waiting_;
  std::vector<Sequence*> running_;
  std::int64_t num_preemptions_ = 0;
};

}  // namespace ferry::rollout
