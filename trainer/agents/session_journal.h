// All that programs have answered in a run, by step, so that the run can be played again without
// them, to the byte: DIR/<step>.jsonl, a line for each session in the order of the batch,
//
//   {"session": 123, "exchanges": [{"question": {...}, "answer": {...}}, ...]}
//
// and DIR/validation/<step>.jsonl, of validation behind a step. A line of a partial rollout also
// has the step that learns from the session, and how many tokens the weights behind which step
// drew: "step": 7, "global_steps": [[4, 17], [5, 3]].
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>

#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

inline constexpr const char* kSessionFolder = "sessions";  // in that of a run

class SessionJournal {
 public:
  // A run that goes on at `first_step` forgets that step and after. Throws Error(kIo).
  SessionJournal(std::filesystem::path folder, std::int64_t first_step);

  // Adds the sessions of a batch, by its seeds and agent_info; agent_info of partial rollouts has
  // global_steps.
  void write(std::int64_t step, bool validates, const RolloutBatch& batch) const;

 private:
  std::filesystem::path folder_;
};

// [[a step, how many tokens], ...]
nlohmann::json runs_of_steps(std::span<const std::int64_t> global_steps);

// Sets `replay` of prompts with seeds, whose sessions the journal has under the steps from `first`
// to `last`. Where these are several, sessions may be in none: the run ended before they did.
// Throws Error(kUsage) if the journal lacks a session otherwise, Error(kCorrupt).
void add_replay(RolloutBatch& prompts,
                const std::filesystem::path& folder,
                std::int64_t first,
                std::int64_t last,
                bool validates);

}  // namespace ferry::trainer
