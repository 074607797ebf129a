// The times of what a rank did: named spans of a step, a line of JSON each. Every rank has its own
// file; `ferry report` draws them.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "trainer/metrics/append_file.h"

namespace ferry::trainer {

struct Span {
  std::string name{};  // "update_actor", "forward"; "tool/search" of others that work beside
  double start = 0;    // seconds since 1970
  double end = 0;
  int rank = 0;
  std::int64_t step = 0;
  bool operator==(const Span&) const = default;
};

class Timeline {
 public:
  // <folder>/timeline_rank<R>.jsonl; a run that goes on at `first_step` forgets what is not before
  // it.
  Timeline(const std::filesystem::path& folder, int rank, std::int64_t first_step);

  void begin_step(std::int64_t step) { step_ = step; }

  // Ends when it is destroyed: const auto span = timeline.span("forward");
  class Scope {
   public:
    Scope(Timeline& timeline, std::string name);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Timeline& timeline_;
    std::string name_;
    double start_;
  };
  Scope span(std::string name) { return Scope(*this, std::move(name)); }

  // One that somebody else timed: events of a device.
  void add(std::string name, double start, double end);

  // Writes the spans of the step, and says how many seconds each name took: metrics
  // timing_s/<name>. Names with a slash are of programs that work beside this rank, many at a time:
  // these are not counted.
  std::map<std::string, double> end_step();

 private:
  AppendFile file_;
  int rank_;
  std::int64_t step_ = 0;
  std::vector<Span> spans_;  // of this step
};

}  // namespace ferry::trainer
