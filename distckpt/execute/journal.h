// The log of a running copy: one record per finished task, so that an interrupted run can go on
// where it stopped. A record that was cut off by the interruption is ignored; a log of another plan
// or source is refused.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "distckpt/elements/digest.h"
#include "distckpt/plan/box_io.h"

namespace ferry::distckpt {

struct TaskRecord {
  std::uint32_t task = 0;
  std::vector<Digest> blocks{};  // of the task's segments, in order
  std::vector<ChecksumPart> read{};
  std::vector<ChecksumPart> written{};
};

class Journal {
 public:
  // Starts a new log, or with `resume` continues one. `fingerprint` names plan, sources and
  // options; throws Error(kUsage) if the log that is there has another. What `others` hold, logs of
  // other processes that share the work, counts as finished too.
  Journal(std::filesystem::path path,
          const Digest& fingerprint,
          bool resume,
          const std::vector<std::filesystem::path>& others = {});
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  const TaskRecord* finished(std::uint32_t task) const;
  std::size_t num_finished() const { return finished_.size(); }

  // Forgets the tasks that `keep` denies: they have to be done again.
  void keep_only(const std::function<bool(std::uint32_t)>& keep);

  void append(const TaskRecord& record);  // thread-safe

 private:
  // The records of a log; how many of its bytes are whole ones.
  std::int64_t take_records(const std::filesystem::path& path, std::string_view header);

  std::filesystem::path path_;
  int fd_ = -1;
  std::mutex mutex_;
  std::unordered_map<std::uint32_t, TaskRecord> finished_;
};

}  // namespace ferry::distckpt
