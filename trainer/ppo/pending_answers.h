// The answers of an asynchronous run that nobody has learned from yet, beside a checkpoint:
// RUN/pending/iter_0000003.cbor. A run that goes on takes them up, so that a checkpoint waits for
// no answer that the next step would not wait for.
//
// The file is a few bytes that name it, and records, each with its size and CRC-32: a description,
// then the rows, some thousand tokens each. Rank 0 holds one record of them while it writes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/storage/file_io.h"
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

// Brings the columns that other ranks keep of some rows of an answered batch.
using GatherRows = std::function<RolloutBatch(const RolloutBatch&)>;

// Writes the file of a step, whole or not at all. Throws Error(kIo).
void write_pending(const std::filesystem::path& run,
                   std::int64_t step,
                   const PendingAnswers& answers,
                   const GatherRows& gather);
// Removes those of steps that are not among `kept`.
void forget_pending(const std::filesystem::path& run, std::span<const std::int64_t> kept);

// Reads the file of a step. Throws Error(kNotFound | kIo), and Error(kCorrupt) naming the file and
// the byte for anything but what was written.
class PendingReader {
 public:
  PendingReader(const std::filesystem::path& run, std::int64_t step);

  // All but the rows; answered batches are there without theirs.
  const PendingAnswers& description() const { return description_; }
  // The rows of the next batch: batch and greedy of each answered one, drawn, under_way, sessions.
  RolloutBatch next_rows();

 private:
  std::string next_record();

  distckpt::ReadFile file_;
  std::int64_t at_ = 0;  // of the next record
  PendingAnswers description_{};
  std::vector<std::int64_t> num_records_{};  // of each batch
  std::size_t next_ = 0;                     // batch
};

}  // namespace ferry::trainer
