// One thread of an executor: its staging buffers, and what running a segment of the schedule does.
#pragma once

#include <functional>
#include <memory>
#include <memory_resource>
#include <stop_token>
#include <vector>

#include "distckpt/execute/executor.h"
#include "distckpt/execute/journal.h"
#include "distckpt/plan/box_io.h"
#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/schedule.h"

namespace ferry::distckpt {

class TaskWorker {
 public:
  using Amend = std::function<void(std::uint32_t, std::int64_t, std::span<std::byte>)>;

  // All must outlive it. Without a sink what is read is digested only. `amend`, if it is not empty,
  // changes each stretch of a tensor after its replicas were compared.
  TaskWorker(const CopyPlan& plan,
             const BufferSizes& sizes,
             std::pmr::memory_resource* resource,
             BoxSource& source,
             BoxSink* sink,
             const Amend& amend);
  ~TaskWorker();
  TaskWorker(const TaskWorker&) = delete;
  TaskWorker& operator=(const TaskWorker&) = delete;

  // Adds to `record` and `nonzero_padding`. `compared` is called for each replica's stretch.
  // Returns in the middle of a tensor where `stop` asks for it.
  void run(const Segment& segment,
           const std::function<void(const Comparison&)>& compared,
           const std::stop_token& stop);

  // Fills `into` with the box of a tensor's grid, row-major: elements of its dtype. The scratch
  // buffers hold them, and the stored ones. Throws Error(kLayout) where a second copy differs.
  void read(std::uint32_t tensor, const Box& box, std::span<std::byte> into);

  TaskRecord record{};  // of the task at hand: the caller begins a new one
  std::vector<NonZeroPadding> nonzero_padding{};

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ferry::distckpt
