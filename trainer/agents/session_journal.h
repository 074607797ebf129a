// All that programs have answered in a run, by step, so that the run can be played again without
// them, to the byte: DIR/<step>.jsonl, a line for each session in the order of the batch,
//
//   {"session": 123, "exchanges": [{"question": {...}, "answer": {...}}, ...]}
//
// and DIR/validation/<step>.jsonl, of validation behind a step.
#pragma once

#include <cstdint>
#include <filesystem>

#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

inline constexpr const char* kSessionFolder = "sessions";  // in that of a run

class SessionJournal {
 public:
  // A run that goes on at `first_step` forgets that step and after. Throws Error(kIo).
  SessionJournal(std::filesystem::path folder, std::int64_t first_step);

  // Adds the sessions of a batch, by its seeds and agent_info.
  void write(std::int64_t step, bool validates, const RolloutBatch& batch) const;

 private:
  std::filesystem::path folder_;
};

// Sets `replay` of prompts with seeds. Throws Error(kUsage) if the journal lacks one of the
// sessions, Error(kCorrupt).
void add_replay(RolloutBatch& prompts,
                const std::filesystem::path& folder,
                std::int64_t step,
                bool validates);

}  // namespace ferry::trainer
