#include "trainer/agents/session_journal.h"

#include <algorithm>
#include <limits>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"
#include "trainer/metrics/append_file.h"
#include "trainer/metrics/sample_log.h"

namespace ferry::trainer {

using nlohmann::json;

namespace {

std::filesystem::path journal_of(const std::filesystem::path& folder,
                                 std::int64_t step,
                                 bool validates) {
  return (validates ? folder / "validation" : folder) / fmt::format("{}.jsonl", step);
}

// A session that waits for weights that never come.
json never_finished() {
  constexpr auto kNever = std::numeric_limits<std::int64_t>::max();
  return {{"exchanges", json::array()},
          {"step", kNever},
          {"global_steps", json::array({json::array({kNever, 0})})}};
}

}  // namespace

SessionJournal::SessionJournal(std::filesystem::path folder, std::int64_t first_step)
    : folder_(std::move(folder)) {
  forget_steps(folder_, first_step);
  forget_steps(folder_ / "validation", first_step);
}

void SessionJournal::write(std::int64_t step, bool validates, const RolloutBatch& batch) const {
  std::string lines;
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    const auto& session = batch.agent_info[static_cast<std::size_t>(row)];
    nlohmann::ordered_json line{{"session", batch.seeds[row].item<std::int64_t>()},
                                {"exchanges", session.at("exchanges")}};
    if (session.contains("global_steps")) {
      line["step"] = step;
      line["global_steps"] = session["global_steps"];
    }
    lines += line.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
  }
  AppendFile(journal_of(folder_, step, validates)).append(lines);
}

json runs_of_steps(std::span<const std::int64_t> global_steps) {
  std::vector<std::pair<std::int64_t, std::int64_t>> runs;
  for (const auto step : global_steps) {
    if (runs.empty() || runs.back().first != step) runs.emplace_back(step, 0);
    ++runs.back().second;
  }
  return runs;
}

void add_replay(RolloutBatch& prompts,
                const std::filesystem::path& folder,
                std::int64_t first,
                std::int64_t last,
                bool validates) {
  std::map<std::int64_t, json> sessions;
  for (auto at = std::max<std::int64_t>(first, 0); at <= last; ++at) {
    const auto path = journal_of(folder, at, validates);
    if (first < last && !std::filesystem::exists(path)) continue;
    std::istringstream lines(distckpt::read_text(path));
    for (std::string line; std::getline(lines, line);) {
      auto session = distckpt::parse_json(line, path.string());
      const auto seed = distckpt::json_int(distckpt::json_at(session, "session", path.string()),
                                           "session", path.string());
      if (!session.contains("exchanges")) session["exchanges"] = json::array();
      sessions[seed] = std::move(session);
    }
  }
  prompts.replay.clear();
  for (std::int64_t row = 0; row < prompts.size(); ++row) {
    const auto seed = prompts.seeds[row].item<std::int64_t>();
    const auto found = sessions.find(seed);
    require(found != sessions.end() || first < last, ErrorKind::kUsage,
            "{}: has no session {}: the run is another one than that which is played again",
            journal_of(folder, first, validates).string(), seed);
    prompts.replay.push_back(found != sessions.end() ? found->second : never_finished());
  }
}

}  // namespace ferry::trainer
