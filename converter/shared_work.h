// The processes of one conversion, started by torchrun, srun or mpirun: all make the same plan,
// each does its share of the tasks, and rank 0 publishes. They have nothing in common but the
// working folder, where each keeps its own journal.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "converter/progress.h"
#include "distckpt/elements/digest.h"
#include "distckpt/execute/executor.h"
#include "distckpt/execute/rendezvous.h"

namespace ferry::converter {

class SharedWork {
 public:
  // `look` is for ranks that did not make the folder: it is called until they have met.
  SharedWork(const distckpt::RankOfJob& job,
             std::filesystem::path work_folder,
             std::function<void()> look = {});

  bool is_first() const { return job_.rank == 0; }
  bool is_alone() const { return job_.size == 1; }

  // This rank's journal: rank 0 has the name as it is, others add their number. Then those that
  // other ranks of this run or of an interrupted one of any size have left.
  std::filesystem::path journal(std::string_view name) const;
  std::vector<std::filesystem::path> other_journals(std::string_view name) const;

  // The share of this rank.
  void limit(distckpt::ExecutorOptions& options) const;

  // Waits until all ranks have come; a rank that is alone does not wait. meet() comes first, and
  // runs `make` before the ranks meet on rank 0, whose files are then there, and after that on
  // others.
  void meet(const distckpt::Digest& fingerprint,
            const ProgressFunction& progress,
            const std::function<void()>& make);
  void barrier(std::string_view name);
  void by_first(std::string_view name, const std::function<void()>& act);  // while all others wait
  void leave(std::string_view name);  // the last one: only rank 0 waits
  void fail(std::string_view message) noexcept;

 private:
  distckpt::RankOfJob job_;
  std::filesystem::path folder_;
  std::function<void()> look_;
  std::unique_ptr<distckpt::Rendezvous> ranks_;
};

}  // namespace ferry::converter
