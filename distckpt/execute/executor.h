// Runs a CopyPlan over a BoxSource and a BoxSink: reads each source byte once, digests it once,
// writes it once. Memory is bounded by the staging buffers, whatever the model's size; the bytes
// are the same at any number of threads.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <memory_resource>
#include <span>
#include <string>
#include <vector>

#include "distckpt/elements/digest.h"
#include "distckpt/execute/journal.h"
#include "distckpt/plan/box_io.h"
#include "distckpt/plan/copy_plan.h"

namespace ferry::distckpt {

// A stretch of a replica beside the same stretch of the source.
struct Comparison {
  std::uint32_t tensor = 0;   // index into CopyPlan::tensors
  std::uint32_t replica = 0;  // index into PlannedTensor::replicas
  std::int64_t element = 0;   // row-major index of the first element of the spans
  std::span<const std::byte> expected{};
  std::span<const std::byte> found{};
  bool equal = true;  // in every byte
};

struct ExecutorOptions {
  int threads = 0;                                    // 0: one per core
  std::int64_t max_memory = std::int64_t{192} << 20;  // of all staging buffers together
  std::pmr::memory_resource* staging = nullptr;       // where buffers come from; null: the heap
  Journal* journal = nullptr;                         // skip what it holds, log the rest
  // Of `num_shares` processes that share the plan this one does its tasks alone: the share-th of as
  // many equal parts. The digests are whole only once a journal holds all of them.
  int share = 0;
  int num_shares = 1;

  // Go through the pieces of the targets: of the tensors only that is read which is written. For a
  // plan of which a rank keeps its part; without digests, which are those of whole tensors.
  // Replicas are read where they are written, and no one is asked about them: a difference is an
  // Error.
  bool by_target = false;

  // Called with each stretch of each replica, by several threads at a time. A stretch begins at a
  // block of the tensor's digest. Empty: a stretch that differs is an Error(kLayout).
  std::function<void(const Comparison&)> on_compared{};
};

// Padding in the source that was not zero: dropped, and therefore reported.
struct NonZeroPadding {
  std::string tensor{};
  Box box{};
};

struct ExecuteReport {
  std::vector<Digest> digests{};   // per tensor of the plan; none by_target
  std::int64_t bytes = 0;          // of the model's tensors
  std::int64_t resumed_bytes = 0;  // of these, done by an earlier run
  std::vector<NonZeroPadding> nonzero_padding{};
};

// A running plan. Destroying it cancels and waits.
class Execution {
 public:
  ~Execution();
  Execution(Execution&&) noexcept;
  Execution& operator=(Execution&&) noexcept;

  std::int64_t bytes_done() const;
  std::int64_t bytes_total() const;

  // True once everything is done or has failed.
  bool wait_for(std::chrono::milliseconds time);

  // Waits; throws what a thread threw first, and Error(kCancelled) after cancel().
  ExecuteReport wait();

  void cancel();

 private:
  friend class Executor;
  struct State;
  explicit Execution(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

class Executor {
 public:
  explicit Executor(ExecutorOptions options) : options_(std::move(options)) {}

  // Plan, source, sink and journal must outlive the execution. Without a sink the plan is read and
  // digested only. Throws Error(kUsage) if max_memory is too small for one thread.
  Execution submit(const CopyPlan& plan, BoxSource& source, BoxSink* sink) const;

 private:
  ExecutorOptions options_;
};

// What the threads of `submit` would allocate.
struct StagingBudget {
  int threads = 0;
  std::int64_t bytes = 0;
};
StagingBudget staging_budget(const CopyPlan& plan, const ExecutorOptions& options);

}  // namespace ferry::distckpt
