#include "trainer/ppo/pending_answers.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>
#include <system_error>
#include <tuple>

#include "distckpt/base/cbor.h"
#include "distckpt/base/error.h"
#include "distckpt/elements/crc32.h"
#include "distckpt/storage/filenames.h"

namespace ferry::trainer {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kVersion = 2;  // of RolloutBatch::to_bytes(), too

fs::path file_of_pending(const fs::path& run, std::int64_t step) {
  return run / "pending" / (distckpt::iteration_folder({step}) + ".cbor");
}

// Bytes that no CBOR begins with.
constexpr std::string_view kMagic =
    "\xff"
    "pending";
constexpr std::int64_t kTokensOfRecord = 1 << 16;

struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Rows that are written together; one range at least.
std::vector<RowRange> records_of(const RolloutBatch& batch) {
  std::vector<RowRange> records;
  std::int64_t begin = 0;
  do {
    auto end = std::min(begin + 1, batch.size());
    const auto most = batch.offsets[static_cast<std::size_t>(begin)] + kTokensOfRecord;
    while (end < batch.size() && batch.offsets[static_cast<std::size_t>(end) + 1] <= most) ++end;
    records.push_back({begin, end});
    begin = end;
  } while (begin < batch.size());
  return records;
}

// A batch that is written, and who brings its columns.
struct BatchToWrite {
  const RolloutBatch& batch;
  const GatherRows& gather;
};

class PendingWriter {
 public:
  explicit PendingWriter(const fs::path& path) : file_(path, 0) {
    append(distckpt::as_bytes(kMagic));
  }

  void write(std::span<const std::byte> bytes) {
    const std::uint64_t size = bytes.size();
    const auto head = std::as_bytes(std::span(&size, 1));
    const auto crc = distckpt::crc32(bytes, distckpt::crc32(head));
    append(head);
    append(std::as_bytes(std::span(&crc, 1)));
    append(bytes);
  }
  void sync() const { file_.sync(); }

 private:
  void append(std::span<const std::byte> bytes) {
    file_.write_at(size_, bytes);
    size_ += static_cast<std::int64_t>(bytes.size());
  }

  distckpt::WriteFile file_;
  std::int64_t size_ = 0;
};

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

void write_pending(const fs::path& run,
                   std::int64_t step,
                   const PendingAnswers& answers,
                   const GatherRows& gather) {
  const GatherRows itself = [](const RolloutBatch& rows) { return rows; };
  json description{{"settings", answers.settings},
                   {"data", answers.data},
                   {"data_before", answers.data_before},
                   {"last_asked", answers.last_asked},
                   {"last_drawn", answers.last_drawn},
                   {"num_started", answers.num_started},
                   {"epoch", answers.epoch},
                   {"answered", json::array()},
                   {"num_records", json::array()}};
  std::vector<BatchToWrite> batches;
  for (const auto& one : answers.answered) {
    description["answered"].push_back({{"step", one.step}, {"epoch", one.epoch}});
    batches.push_back({one.batch, gather});
    batches.push_back({one.greedy, itself});
  }
  for (const auto* const batch : {&answers.drawn, &answers.under_way, &answers.sessions})
    batches.push_back({*batch, itself});
  for (const auto& one : batches)
    description["num_records"].push_back(records_of(one.batch).size());

  const auto path = file_of_pending(run, step);
  const auto part = fs::path(path).replace_extension(".part");
  fs::create_directories(path.parent_path());
  PendingWriter file(part);
  file.write(distckpt::as_bytes(to_cbor(description)));
  for (const auto& [batch, columns_of] : batches)
    for (const auto& [begin, end] : records_of(batch))
      file.write(columns_of(batch.slice(begin, end)).to_bytes());
  file.sync();
  fs::rename(part, path);
  distckpt::sync_directory(path.parent_path());
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

PendingReader::PendingReader(const fs::path& run, std::int64_t step)
    : file_(file_of_pending(run, step)) {
  std::string magic(std::min<std::size_t>(kMagic.size(), static_cast<std::size_t>(file_.size())),
                    '\0');
  file_.read_at(0, std::as_writable_bytes(std::span(magic)));
  if (magic != kMagic)
    throw Error(ErrorKind::kCorrupt,
                fmt::format("{}: does not begin as pending answers do", file_.path().string()),
                "without the file the run begins anew behind the checkpoint");
  at_ = static_cast<std::int64_t>(kMagic.size());
  try {
    const auto all = from_cbor<json>(next_record());
    description_.settings = all.at("settings");
    all.at("data").get_to(description_.data);
    all.at("data_before").get_to(description_.data_before);
    all.at("last_asked").get_to(description_.last_asked);
    all.at("last_drawn").get_to(description_.last_drawn);
    all.at("num_started").get_to(description_.num_started);
    all.at("epoch").get_to(description_.epoch);
    for (const auto& one : all.at("answered"))
      description_.answered.push_back({.step = one.at("step"), .epoch = one.at("epoch")});
    all.at("num_records").get_to(num_records_);
  } catch (const json::exception& error) {
    fail(ErrorKind::kCorrupt, "{}: {}", file_.path().string(), error.what());
  }
}

std::string PendingReader::next_record() {
  std::uint64_t size = 0;
  std::uint32_t expected = 0;
  const auto head = std::as_writable_bytes(std::span(&size, 1));
  const auto begin = at_;
  const auto take = [&](std::span<std::byte> into) {
    file_.read_at(at_, into);
    at_ += static_cast<std::int64_t>(into.size());
  };
  take(head);
  take(std::as_writable_bytes(std::span(&expected, 1)));
  require(size <= static_cast<std::uint64_t>(file_.size() - at_), ErrorKind::kCorrupt,
          "{}: byte {}: {} bytes follow, the file says {}", file_.path().string(), begin,
          file_.size() - at_, size);
  std::string bytes(static_cast<std::size_t>(size), '\0');
  take(std::as_writable_bytes(std::span(bytes)));
  const auto crc = distckpt::crc32(distckpt::as_bytes(bytes), distckpt::crc32(head));
  require(crc == expected, ErrorKind::kCorrupt,
          "{}: bytes {} to {} have CRC-32 {:08x}, the file says {:08x}", file_.path().string(),
          begin, at_, crc, expected);
  return bytes;
}

RolloutBatch PendingReader::next_rows() {
  require(next_ < num_records_.size(), ErrorKind::kBug, "all pending answers have been read");
  std::vector<RolloutBatch> parts;
  for (std::int64_t i = 0; i < num_records_[next_]; ++i) {
    const auto record = next_record();
    parts.push_back(
        with_context([&] { return file_.path().string(); },
                     [&] { return RolloutBatch::from_bytes(distckpt::as_bytes(record)); }));
  }
  ++next_;
  require(next_ < num_records_.size() || at_ == file_.size(), ErrorKind::kCorrupt,
          "{}: byte {}: expected its end", file_.path().string(), at_);
  return parts.size() == 1 ? std::move(parts.front()) : RolloutBatch::concat(parts);
}

}  // namespace ferry::trainer
