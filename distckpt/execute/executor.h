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
#include "distckpt/plan/schedule.h"

namespace ferry::distckpt {

// A stretch of a replica and the same stretch of the source.
struct Comparison {
  std::uint32_t tensor = 0;   // index into CopyPlan::tensors
  std::uint32_t replica = 0;  // index into PlannedTensor::replicas
  std::int64_t element = 0;   // row-major index of the first element of the spans
  std::span<const std::byte> expected{};
  std::span<const std::byte> found{};
  bool equal = true;  // in every byte
};

// "TENSOR: its second copy differs from the first, at element N (FILE, and FILE)", without the
// files if the source's storages have no names.
std::string describe_difference(const CopyPlan& plan,
                                const BoxSource& source,
                                const Comparison& comparison);

struct ExecutorOptions {
  int threads = 0;                                    // 0: one per core
  std::int64_t max_memory = std::int64_t{192} << 20;  // of all staging buffers together
  std::int64_t thread_memory = 0;                // of these, what each thread takes in callbacks
  std::pmr::memory_resource* staging = nullptr;  // where buffers come from; null: the heap
  Journal* journal = nullptr;                    // skip what it holds, log the rest
  // This process does the share-th of `num_shares` parts of the tasks, about equal in bytes. The
  // digests are whole only once a journal holds all of them.
  int share = 0;
  int num_shares = 1;

  // The part of a tensor that submit() has one thread go through from front to back, for callbacks
  // that take its elements in order: with on_read a slab at least.
  InOrder in_order = InOrder::kStretches;

  // submit() calls it with each stretch of each replica, from several threads at a time. A stretch
  // begins at a block of the tensor's digest. Empty: a stretch that differs is an Error(kLayout).
  std::function<void(const Comparison&)> on_compared{};

  // submit() calls it with each stretch of each tensor (its index in the plan, the row-major index
  // of the first element, the elements), from several threads at a time, after the replicas were
  // compared: what it changes is digested and written. Stretches are those of on_compared.
  std::function<void(std::uint32_t, std::int64_t, std::span<std::byte>)> on_read{};
};

// Padding in the source that was not zero: dropped, and therefore reported.
struct NonZeroPadding {
  std::string tensor{};
  Box box{};
};

struct ExecuteReport {
  std::vector<Digest> digests{};   // per tensor of the plan; none after submit_pieces()
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

  // Reads and digests every tensor of the plan, and writes it to `sink` unless that is null. Plan,
  // source, sink and journal must outlive the execution. Throws Error(kUsage) if max_memory is too
  // small for one thread.
  Execution submit(const CopyPlan& plan, BoxSource& source, BoxSink* sink) const;

  // Writes the pieces of the targets, and reads only their elements: for a plan of which a rank
  // keeps its part. There are no digests, which are those of whole tensors. Replicas are read where
  // the targets have pieces; one that differs is an Error(kLayout).
  Execution submit_pieces(const CopyPlan& plan, BoxSource& source, BoxSink& sink) const;

 private:
  Execution start(Schedule schedule,
                  const CopyPlan& plan,
                  BoxSource& source,
                  BoxSink* sink,
                  bool digests) const;

  ExecutorOptions options_;
};

// The threads that an execution starts, and the buffers that they allocate.
struct StagingBudget {
  int threads = 0;
  std::int64_t bytes = 0;
  bool operator==(const StagingBudget&) const = default;
};
StagingBudget staging_budget(const CopyPlan& plan,
                             const ExecutorOptions& options,
                             Staged staged = Staged::kStretches);

}  // namespace ferry::distckpt
