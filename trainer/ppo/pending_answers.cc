#include "trainer/ppo/pending_answers.h"

#include <algorithm>
#include <limits>
#include <system_error>
#include <tuple>

#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/filenames.h"

namespace ferry::trainer {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kVersion = 1;  // of RolloutBatch::to_bytes(), too

fs::path file_of_pending(const fs::path& run, std::int64_t step) {
  return run / "pending" / (distckpt::iteration_folder({step}) + ".cbor");
}

json packed(const RolloutBatch& batch) {
  const auto bytes = batch.to_bytes();
  const auto* const begin = reinterpret_cast<const std::uint8_t*>(bytes.data());
  return json::binary({begin, begin + bytes.size()});
}

RolloutBatch unpacked(const json& bytes) {
  return RolloutBatch::from_bytes(std::as_bytes(std::span(bytes.get_binary())));
}

}  // namespace

std::int64_t PendingAnswers::num_rows() const {
  auto rows = drawn.size() + under_way.size();
  for (const auto& one : answered) rows += one.batch.size();
  return rows;
}

json settings_of_answers(const PpoConfig& config) {
  const auto& [data, rollout] = std::tie(config.data, config.rollout);
  const bool partial = config.async_training.partial_rollout;
  const bool agents = rollout.agents.enabled();
  const bool scores_early = config.reward.scores_early();
  return {{"version", kVersion},
          {"seed", config.trainer.run.seed},
          {"train_batch_size", data.train_batch_size},
          {"gen_batch_size", data.gen_batch_size.value_or(0)},
          {"max_prompt_length", data.max_prompt_length},
          {"max_response_length", data.max_response_length},
          {"n", rollout.n},
          {"batches_ahead", config.batches_ahead()},
          {"trigger_parameter_sync_step", config.async_training.trigger_parameter_sync_step},
          {"partial_rollout", partial},
          {"adv_estimator", static_cast<int>(config.algorithm.adv_estimator)},
          {"takes_old_log_prob", config.takes_old_log_prob()},
          {"truncates", rollout.truncates()},
          {"router_replay", static_cast<int>(config.actor.router_replay.mode)},
          {"scores_early", scores_early},
          {"agents", agents},
          {"messages", agents && !config.reward.command.empty() && !scores_early},
          {"replays", !rollout.agents.agent.replay_dir.empty()}};
}

void write_pending(const fs::path& run, std::int64_t step, const PendingAnswers& answers) {
  json file{{"settings", answers.settings},
            {"data", answers.data},
            {"data_before", answers.data_before},
            {"last_asked", answers.last_asked},
            {"last_drawn", answers.last_drawn},
            {"num_started", answers.num_started},
            {"epoch", answers.epoch},
            {"drawn", packed(answers.drawn)},
            {"under_way", packed(answers.under_way)},
            {"sessions", packed(answers.sessions)}};
  file["answered"] = json::array();
  for (const auto& one : answers.answered)
    file["answered"].push_back({{"step", one.step},
                                {"epoch", one.epoch},
                                {"batch", packed(one.batch)},
                                {"greedy", packed(one.greedy)}});
  std::string bytes;
  json::to_cbor(file, bytes);
  const auto path = file_of_pending(run, step);
  fs::create_directories(path.parent_path());
  distckpt::replace_text(path, bytes);
}

void forget_pending(const fs::path& run, std::span<const std::int64_t> kept) {
  std::error_code error;  // nothing was pending
  std::vector<fs::path> gone;
  for (const auto& file : fs::directory_iterator(run / "pending", error)) {
    const auto of = distckpt::parse_iteration_folder(file.path().stem().string());
    if (of && of->number && std::ranges::find(kept, *of->number) == kept.end())
      gone.push_back(file.path());
  }
  for (const auto& file : gone) fs::remove(file, error);
}

PendingAnswers read_pending(const fs::path& run, std::int64_t step) {
  const auto path = file_of_pending(run, step);
  const auto bytes = distckpt::read_text(path, std::numeric_limits<std::int64_t>::max());
  return with_context([&] { return path.string(); },
                      [&] {
                        try {
                          const auto file = json::from_cbor(bytes);
                          PendingAnswers answers{.settings = file.at("settings")};
                          file.at("data").get_to(answers.data);
                          file.at("data_before").get_to(answers.data_before);
                          file.at("last_asked").get_to(answers.last_asked);
                          file.at("last_drawn").get_to(answers.last_drawn);
                          file.at("num_started").get_to(answers.num_started);
                          file.at("epoch").get_to(answers.epoch);
                          for (const auto& one : file.at("answered"))
                            answers.answered.push_back({.step = one.at("step"),
                                                        .epoch = one.at("epoch"),
                                                        .batch = unpacked(one.at("batch")),
                                                        .greedy = unpacked(one.at("greedy"))});
                          answers.drawn = unpacked(file.at("drawn"));
                          answers.under_way = unpacked(file.at("under_way"));
                          answers.sessions = unpacked(file.at("sessions"));
                          return answers;
                        } catch (const json::exception& error) {
                          fail(ErrorKind::kCorrupt, "pending answers: {}", error.what());
                        }
                      });
}

}  // namespace ferry::trainer
