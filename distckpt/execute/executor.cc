#include "distckpt/execute/executor.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stop_token>
#include <thread>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/base/interruption.h"
#include "distckpt/base/threads.h"
#include "distckpt/execute/task_worker.h"

namespace ferry::distckpt {

struct Execution::State {
  const CopyPlan* plan = nullptr;
  BoxSource* source = nullptr;
  BoxSink* sink = nullptr;
  ExecutorOptions options;
  Schedule schedule;
  BufferSizes sizes;

  // Per tensor, and empty without digests; each element is written by one task.
  std::vector<std::vector<Digest>> blocks;
  std::atomic<std::uint32_t> next_task = 0;
  std::uint32_t end_task = 0;
  std::atomic<std::int64_t> bytes_done = 0;
  std::int64_t bytes_total = 0;
  std::int64_t resumed_bytes = 0;

  std::mutex mutex;
  std::condition_variable finished;
  int running = 0;
  std::exception_ptr failure;
  std::vector<NonZeroPadding> nonzero_padding;
  std::stop_source stop;
  std::vector<std::jthread> threads;

  std::int64_t bytes_of(const Segment& segment) const {
    const auto length = segment.end - segment.begin;
    if (segment.kind == Segment::Kind::kTensor) return length;
    if (segment.kind != Segment::Kind::kPiece) return 0;
    return length * size_of(plan->tensors[segment.index].tensor.dtype);
  }

  void store_blocks(const Task& task, const std::vector<Digest>& digests) {
    std::size_t at = 0;
    for (std::uint32_t s = task.first; s < task.first + task.count; ++s) {
      const auto& segment = schedule.segments[s];
      if (segment.kind != Segment::Kind::kTensor) continue;
      auto& into = blocks[segment.index];
      const auto first = static_cast<std::size_t>(segment.begin / kDigestBlock);
      const auto count =
          static_cast<std::size_t>(ceil_div(segment.end - segment.begin, kDigestBlock));
      require(at + count <= digests.size(), ErrorKind::kCorrupt,
              "the journal holds too few digests");
      std::copy_n(digests.begin() + static_cast<std::ptrdiff_t>(at), count,
                  into.begin() + static_cast<std::ptrdiff_t>(first));
      at += count;
    }
  }

  void compared(const Comparison& comparison) const {
    if (options.on_compared) return options.on_compared(comparison);
    if (!comparison.equal)
      fail(ErrorKind::kLayout, "{}", describe_difference(*plan, *source, comparison));
  }

  void work() {
    try {
      auto* const resource =
          options.staging != nullptr ? options.staging : std::pmr::new_delete_resource();
      TaskWorker worker(*plan, sizes, resource, *source, sink, options.on_read);
      const std::function<void(const Comparison&)> report = [this](const Comparison& one) {
        compared(one);
      };
      while (!stop.stop_requested()) {
        const auto index = next_task.fetch_add(1);
        if (index >= end_task) break;
        const bool resumed =
            options.journal != nullptr && options.journal->finished(index) != nullptr;
        const auto& task = schedule.tasks[index];
        worker.record = {.task = index, .blocks = {}, .read = {}, .written = {}};
        std::int64_t bytes = 0;
        for (std::uint32_t s = task.first; s < task.first + task.count; ++s) {
          const auto& segment = schedule.segments[s];
          // Padding is looked at again: whether it was zero is reported, but not logged.
          if (resumed && segment.kind != Segment::Kind::kDiscard) continue;
          with_context([&] { return describe(segment); },
                       [&] { worker.run(segment, report, stop.get_token()); });
          bytes += bytes_of(segment);
        }
        if (stop.stop_requested()) break;  // the task may not be whole
        if (resumed) continue;
        store_blocks(task, worker.record.blocks);
        source->commit(worker.record.read);
        if (sink != nullptr) sink->commit(worker.record.written);
        if (options.journal != nullptr) options.journal->append(worker.record);
        bytes_done += bytes;
      }
      const std::lock_guard lock(mutex);
      std::ranges::move(worker.nonzero_padding, std::back_inserter(nonzero_padding));
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
      request_stop();
    }
    const std::lock_guard lock(mutex);
    if (--running == 0) finished.notify_all();
  }

  void request_stop() {
    stop.request_stop();
    if (sink != nullptr) sink->cancel();
  }

  std::string describe(const Segment& segment) const {
    switch (segment.kind) {
      case Segment::Kind::kTensor:
      case Segment::Kind::kPiece:
        return fmt::format("{} {}", sink != nullptr ? "copying" : "reading",
                           plan->tensors[segment.index].tensor.name);
      case Segment::Kind::kDiscard:
        return fmt::format("reading the padding of {}", plan->discards[segment.index].tensor);
      case Segment::Kind::kFill:
        return fmt::format("writing the padding of {}", plan->fills[segment.index].tensor);
    }
    return {};
  }
};

Execution::Execution(std::unique_ptr<State> state) : state_(std::move(state)) {}
Execution::Execution(Execution&&) noexcept = default;
Execution& Execution::operator=(Execution&&) noexcept = default;

Execution::~Execution() {
  if (!state_) return;
  cancel();
  state_->threads.clear();
}

std::int64_t Execution::bytes_done() const {
  return state_->bytes_done;
}
std::int64_t Execution::bytes_total() const {
  return state_->bytes_total;
}
void Execution::cancel() {
  state_->request_stop();
}

bool Execution::wait_for(std::chrono::milliseconds time) {
  std::unique_lock lock(state_->mutex);
  return state_->finished.wait_for(lock, time, [&] { return state_->running == 0; });
}

ExecuteReport Execution::wait() {
  auto& state = *state_;
  state.threads.clear();  // joins
  if (state.failure) std::rethrow_exception(state.failure);
  if (state.stop.stop_requested()) throw Error(ErrorKind::kCancelled, "interrupted");
  ExecuteReport report{.digests = {},
                       .bytes = state.bytes_total,
                       .resumed_bytes = state.resumed_bytes,
                       .nonzero_padding = std::move(state.nonzero_padding)};
  for (std::size_t i = 0; i < state.blocks.size(); ++i) {
    const auto& tensor = state.plan->tensors[i].tensor;
    report.digests.push_back(digest_tensor(tensor.dtype, tensor.shape, state.blocks[i]));
  }
  return report;
}

std::string describe_difference(const CopyPlan& plan,
                                const BoxSource& source,
                                const Comparison& comparison) {
  const auto& planned = plan.tensors[comparison.tensor];
  const auto& tensor = planned.tensor;
  const auto mismatch = std::ranges::mismatch(comparison.expected, comparison.found);
  const auto element =
      comparison.element + (mismatch.in1 - comparison.expected.begin()) / size_of(tensor.dtype);
  const auto at = split_flat_range(tensor.grid(), element, element + 1).front().box;
  const auto file = [&](const Cover& cover) {
    const auto piece = std::ranges::find_if(
        cover, [&](const Piece& one) { return intersect(one.box, at).has_value(); });
    return piece == cover.end() ? std::string() : source.name_of(piece->at.storage);
  };
  const auto first = file(planned.source);
  return fmt::format(
      "{}: its second copy differs from the first, at element {}{}", tensor.name, element,
      first.empty()
          ? first
          : fmt::format(" ({}, and {})", first, file(planned.replicas[comparison.replica])));
}

StagingBudget staging_budget(const CopyPlan& plan, const ExecutorOptions& options, Staged staged) {
  const auto per_thread = buffer_sizes(plan, staged).total() + options.thread_memory;
  const auto wanted = threads_or_cores(options.threads);
  const auto affordable = options.max_memory / per_thread;
  require(affordable >= 1, ErrorKind::kUsage,
          "max_memory of {} bytes: is too little: one thread needs {} MiB of buffers",
          options.max_memory, ceil_div(per_thread, 1 << 20));
  const auto threads = static_cast<int>(std::min<std::int64_t>(wanted, affordable));
  return {.threads = threads, .bytes = threads * per_thread};
}

Execution Executor::submit(const CopyPlan& plan, BoxSource& source, BoxSink* sink) const {
  const auto least = options_.on_read ? InOrder::kSlabs : InOrder::kStretches;
  const auto order = std::max(options_.in_order, least);
  return start(make_schedule(plan, sink != nullptr, order), plan, source, sink, true);
}

Execution Executor::submit_pieces(const CopyPlan& plan, BoxSource& source, BoxSink& sink) const {
  require(!options_.on_read, ErrorKind::kBug, "pieces are not amended when they are read");
  return start(make_target_schedule(plan), plan, source, &sink, false);
}

Execution Executor::start(
    Schedule schedule, const CopyPlan& plan, BoxSource& source, BoxSink* sink, bool digests) const {
  auto state = std::make_unique<Execution::State>();
  state->plan = &plan;
  state->source = &source;
  state->sink = sink;
  state->options = options_;
  state->schedule = std::move(schedule);
  const auto staged = !digests           ? Staged::kPieces
                      : options_.on_read ? Staged::kAmended
                                         : Staged::kStretches;
  state->sizes = buffer_sizes(plan, staged);
  std::vector<std::int64_t> ends{0};  // of the tasks, in bytes
  for (const auto& task : state->schedule.tasks) {
    ends.push_back(ends.back());
    for (std::uint32_t one = task.first; one < task.first + task.count; ++one)
      ends.back() += state->bytes_of(state->schedule.segments[one]);
  }
  const auto share_begin = [&](int share) {
    if (share == options_.num_shares) return static_cast<std::uint32_t>(ends.size() - 1);
    const auto bytes = ends.back() / options_.num_shares * share;
    return static_cast<std::uint32_t>(std::ranges::lower_bound(ends, bytes) - ends.begin());
  };
  state->next_task = share_begin(options_.share);
  state->end_task = share_begin(options_.share + 1);
  for (auto i = state->next_task.load(); i < state->end_task; ++i) {
    const auto& task = state->schedule.tasks[i];
    for (std::uint32_t s = task.first; s < task.first + task.count; ++s)
      state->bytes_total += state->bytes_of(state->schedule.segments[s]);
  }
  if (digests) {
    for (const auto& planned : plan.tensors) {
      state->blocks.emplace_back(
          static_cast<std::size_t>(ceil_div(planned.tensor.num_bytes(), kDigestBlock)));
    }
  }
  if (options_.journal != nullptr) {
    for (std::uint32_t i = 0; i < state->schedule.tasks.size(); ++i) {
      const auto* done = options_.journal->finished(i);
      if (done == nullptr) continue;
      const auto& task = state->schedule.tasks[i];
      state->store_blocks(task, done->blocks);
      source.commit(done->read);
      if (sink != nullptr) sink->commit(done->written);
      if (i < state->next_task || i >= state->end_task) continue;
      for (std::uint32_t s = task.first; s < task.first + task.count; ++s) {
        state->resumed_bytes += state->bytes_of(state->schedule.segments[s]);
      }
    }
    state->bytes_done = state->resumed_bytes;
  }
  const auto budget = staging_budget(plan, options_, staged);
  state->running = budget.threads;
  try {
    for (int i = 0; i < budget.threads; ++i) {
      state->threads.emplace_back([running = state.get(), asked = interruption()] {
        const InterruptedBy stop(
            [&] { return running->stop.stop_requested() || (asked && asked()); });
        running->work();
      });
    }
  } catch (...) {
    state->request_stop();  // those that were started are waited for
    throw;
  }
  return Execution(std::move(state));
}

}  // namespace ferry::distckpt
