// The answers of an asynchronous run that nobody has learned from yet, beside a checkpoint:
// RUN/pending/iter_0000003.cbor. A run that goes on takes them up, so that a checkpoint waits for
// no answer that the next step would not wait for.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "trainer/config/ppo_config.h"
#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

// The rows that a step learns from.
struct AnsweredBatch {
  std::int64_t step = 0;
  std::int64_t epoch = 0;  // of the data, once the prompts are drawn
  RolloutBatch batch{};    // prompts; once they are there, with responses
  RolloutBatch greedy{};   // the prompts, one row each, where the greedy answers are a baseline
};

struct PendingAnswers {
  nlohmann::json settings{};  // of the run that wrote them: settings_of_answers()
  std::string data{};         // the stream's state, behind all prompts that were drawn
  std::vector<std::pair<std::int64_t, std::string>> data_before{};  // later steps' prompts
  std::int64_t last_asked = 0;  // RolloutLoop's members of these names, and so on
  std::int64_t last_drawn = 0;
  std::int64_t num_started = 0;
  std::int64_t epoch = 0;
  std::vector<AnsweredBatch> answered{};  // with all columns
  // A partial rollout has prompts that were drawn and not asked for, rows that are under way, and
  // the sessions of these (ActorRolloutRefWorker::carried_sessions()).
  RolloutBatch drawn{}, under_way{}, sessions{};

  std::int64_t num_rows() const;
};

// The settings by which rows and columns of answers differ: only a run with the same takes them up.
nlohmann::json settings_of_answers(const PpoConfig& config);

// Writes the file of a step, whole or not at all. Throws Error(kIo).
void write_pending(const std::filesystem::path& run,
                   std::int64_t step,
                   const PendingAnswers& answers);
// Removes those of steps that are not among `kept`.
void forget_pending(const std::filesystem::path& run, std::span<const std::int64_t> kept);
// Throws Error(kNotFound | kIo | kCorrupt).
PendingAnswers read_pending(const std::filesystem::path& run, std::int64_t step);

}  // namespace ferry::trainer
