#include "trainer/agents/session_journal.h"

#include <map>
#include <sstream>
#include <string>
#include <utility>

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

}  // namespace

SessionJournal::SessionJournal(std::filesystem::path folder, std::int64_t first_step)
    : folder_(std::move(folder)) {
  forget_steps(folder_, first_step);
  forget_steps(folder_ / "validation", first_step);
}

void SessionJournal::write(std::int64_t step, bool validates, const RolloutBatch& batch) const {
  std::string lines;
  for (std::int64_t row = 0; row < batch.size(); ++row) {
    const nlohmann::ordered_json line{
        {"session", batch.seeds[row].item<std::int64_t>()},
        {"exchanges", batch.agent_info[static_cast<std::size_t>(row)].at("exchanges")}};
    lines += line.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
  }
  AppendFile(journal_of(folder_, step, validates)).append(lines);
}

void add_replay(RolloutBatch& prompts,
                const std::filesystem::path& folder,
                std::int64_t step,
                bool validates) {
  const auto path = journal_of(folder, step, validates);
  std::map<std::int64_t, json> sessions;
  std::istringstream lines(distckpt::read_text(path));
  for (std::string line; std::getline(lines, line);) {
    auto session = distckpt::parse_json(line, path.string());
    const auto seed = distckpt::json_int(distckpt::json_at(session, "session", path.string()),
                                         "session", path.string());
    sessions[seed] = session.value("exchanges", json::array());
  }
  prompts.replay.clear();
  for (std::int64_t row = 0; row < prompts.size(); ++row) {
    const auto found = sessions.find(prompts.seeds[row].item<std::int64_t>());
    require(found != sessions.end(), ErrorKind::kUsage,
            "{}: has no session {}: the run is another one than that which is played again",
            path.string(), prompts.seeds[row].item<std::int64_t>());
    prompts.replay.push_back(found->second);
  }
}

}  // namespace ferry::trainer
