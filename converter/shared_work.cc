#include "converter/shared_work.h"

#include <cstdio>
#include <string>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/storage/filenames.h"

namespace ferry::converter {
namespace fs = std::filesystem;

SharedWork::SharedWork(const distckpt::RankOfJob& job,
                       fs::path work_folder,
                       std::function<void()> look)
    : job_(job), folder_(std::move(work_folder)), look_(std::move(look)) {}

fs::path SharedWork::journal(std::string_view name) const {
  return folder_ / (is_first() ? std::string(name) : fmt::format("{}.{}", name, job_.rank));
}

std::vector<fs::path> SharedWork::other_journals(std::string_view name) const {
  std::vector<fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const auto file = entry.path().filename().string();
    if (file != name && !file.starts_with(fmt::format("{}.", name))) continue;
    if (entry.path() != journal(name)) found.push_back(entry.path());
  }
  return found;
}

void SharedWork::limit(distckpt::ExecutorOptions& options) const {
  options.share = job_.rank;
  options.num_shares = job_.size;
}

void SharedWork::meet(const distckpt::Digest& fingerprint,
                      const ProgressFunction& progress,
                      const std::function<void()>& make) {
  if (is_first()) make();
  if (is_alone()) return;
  distckpt::RendezvousOptions options{.look = look_};
  options.late = [size = job_.size](int rank) {  // said even where progress is not
    const auto line = fmt::format(
        "waiting for process {} of {} of this job (RANK, WORLD_SIZE and the like say so); "
        "--no-ranks works alone\n",
        rank, size);
    std::fputs(line.c_str(), stderr);
  };
  if (progress) {
    options.go_on = [progress] { return progress({.stage = "waiting", .bytes_total = 1}); };
  }
  ranks_ = std::make_unique<distckpt::Rendezvous>(folder_ / distckpt::kWorkRanks, job_,
                                                  to_string(fingerprint), std::move(options));
  if (!is_first()) make();
}

void SharedWork::barrier(std::string_view name) {
  if (ranks_) ranks_->barrier(name);
}

void SharedWork::by_first(std::string_view name, const std::function<void()>& act) {
  if (is_first()) act();
  barrier(name);
}

void SharedWork::leave(std::string_view name) {
  if (ranks_) ranks_->leave(name);
}

void SharedWork::fail(std::string_view message) noexcept {
  if (ranks_) ranks_->fail(message);
}

}  // namespace ferry::converter
