#include "distckpt/executor.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "distckpt/cast.h"
#include "distckpt/dequantize.h"
#include "distckpt/error.h"
#include "distckpt/file_box_io.h"
#include "distckpt/schedule.h"

namespace ferry::distckpt {
namespace {

// A buffer from the caller's memory resource, aligned for O_DIRECT and for devices.
class Buffer {
 public:
  Buffer(std::pmr::memory_resource* resource, std::int64_t size)
      : resource_(resource),
        size_(static_cast<std::size_t>(size)),
        data_(size == 0 ? nullptr
                        : static_cast<std::byte*>(resource->allocate(size_, kAlignment))) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    if (data_ != nullptr) resource_->deallocate(data_, size_, kAlignment);
  }

  std::span<std::byte> first(std::int64_t size) {
    require(size <= static_cast<std::int64_t>(size_), ErrorKind::kBug,
            "a staging buffer of {} bytes was asked for {}", size_, size);
    return {data_, static_cast<std::size_t>(size)};
  }

 private:
  static constexpr std::size_t kAlignment = 4096;
  std::pmr::memory_resource* resource_;
  std::size_t size_;
  std::byte* data_;
};

// One thread's view of the work: its buffers and the task it is at.
class Worker {
 public:
  Worker(const CopyPlan& plan,
         const BufferSizes& sizes,
         std::pmr::memory_resource* resource,
         BoxSource& source,
         BoxSink* sink)
      : plan_(plan),
        source_(source),
        sink_(sink),
        staging_(resource, sizes.staging),
        scratch_(resource, sizes.scratch),
        cast_scratch_(resource, sizes.scratch),
        replica_(resource, sizes.replica) {}

  TaskRecord record;
  std::vector<NonZeroPadding> nonzero_padding;

  // `compared` is called for each replica's stretch.
  void run(const Segment& segment, const std::function<void(const Comparison&)>& compared) {
    switch (segment.kind) {
      case Segment::Kind::kTensor:
        return run_tensor(segment, compared);
      case Segment::Kind::kDiscard:
        return run_discard(segment);
      case Segment::Kind::kFill:
        return run_fill(segment);
    }
  }

 private:
  // A stretch of a model tensor in staging: elements [begin, end), as boxes.
  struct Stretch {
    const ModelTensor& tensor;
    std::int64_t begin = 0;
    std::vector<FlatPiece> boxes;
    Dims strides;  // of the model tensor, in bytes

    // Where element `at` of the tensor lies in staging, in bytes.
    std::int64_t position(const Dims& at) const {
      std::int64_t offset = -begin * size_of(tensor.dtype);
      for (int d = 0; d < at.rank(); ++d) offset += at[d] * strides[d];
      return offset;
    }
    // True if the elements of `box` follow each other in staging.
    bool packed(const Box& box) const {
      return fold_runs({.at = {.strides = strides},
                        .size = box.size,
                        .element_size = size_of(tensor.dtype)})
                 .num_runs() == 1;
    }
  };

  static Stretch make_stretch(const ModelTensor& tensor, std::int64_t begin, std::int64_t end) {
    const auto size = size_of(tensor.dtype);
    Stretch stretch{.tensor = tensor,
                    .begin = begin / size,
                    .boxes = split_flat_range(tensor.shape, begin / size, end / size),
                    .strides = row_major_strides(tensor.shape)};
    for (int d = 0; d < stretch.strides.rank(); ++d) stretch.strides[d] *= size;
    return stretch;
  }

  // Calls visit(piece, box) for each part of the cover that lies in the stretch.
  template <typename Visit>
  static void visit_parts(const Cover& cover, const Stretch& stretch, Visit&& visit) {
    for (const auto& piece : cover) {
      for (const auto& flat : stretch.boxes) {
        if (const auto box = intersect(piece.box, flat.box)) visit(piece, *box);
      }
    }
  }

  static Region region_of(const Piece& piece, const Box& box) {
    return {.at = place(piece, box), .size = box.size, .element_size = size_of(piece.dtype)};
  }

  void gather(const Cover& cover,
              const Stretch& stretch,
              Transform transform,
              std::span<std::byte> staging) {
    visit_parts(cover, stretch, [&](const Piece& piece, const Box& box) {
      const auto region = region_of(piece, box);
      const auto bytes = box.volume() * size_of(stretch.tensor.dtype);
      auto* const into = staging.data() + stretch.position(box.offset);
      const bool packed = stretch.packed(box);
      const auto converted =
          packed ? std::span(into, static_cast<std::size_t>(bytes)) : scratch_.first(bytes);
      if (piece.scale >= 0) {
        dequantize_piece(stretch.tensor, piece, region, box, converted);
      } else if (piece.dtype == stretch.tensor.dtype) {
        source_.read(region, converted, record.read);
      } else {
        const auto raw = cast_scratch_.first(region.num_bytes());
        source_.read(region, raw, record.read);
        convert(stretch.tensor.name, piece.dtype, raw, stretch.tensor.dtype, converted, transform,
                box);
      }
      if (packed) return;
      copy_strided(into, stretch.strides, converted.data(),
                   packed_strides(box, stretch.tensor.dtype), box.size,
                   size_of(stretch.tensor.dtype));
    });
  }

  void dequantize_piece(const ModelTensor& tensor,
                        const Piece& piece,
                        const Region& region,
                        const Box& box,
                        std::span<std::byte> into) {
    const auto& scale = plan_.scales[static_cast<std::size_t>(piece.scale)];
    BlockScales scales{.dtype = scale.dtype,
                       .block = scale.block,
                       .box = scales_of(box, scale.block),
                       .packed = {}};
    const Region scale_region{
        .at = place({.box = scale.box, .at = scale.at, .dtype = scale.dtype}, scales.box),
        .size = scales.box.size,
        .element_size = size_of(scale.dtype)};
    std::vector<std::byte> scale_bytes(static_cast<std::size_t>(scale_region.num_bytes()));
    std::vector<ChecksumPart> unused;  // a scale is read as often as its blocks are cut
    source_.read(scale_region, scale_bytes, unused);
    scales.packed = scale_bytes;
    const auto raw = cast_scratch_.first(region.num_bytes());
    source_.read(region, raw, record.read);
    const auto overflow = dequantize(box, piece.dtype, raw, scales, tensor.dtype, into);
    require(!overflow, ErrorKind::kLayout, "{}: element {} of {} overflows {} when dequantised",
            tensor.name, overflow.value_or(0), to_string(box), short_name(tensor.dtype));
  }

  void scatter(const Cover& cover, const Stretch& stretch, std::span<const std::byte> staging) {
    visit_parts(cover, stretch, [&](const Piece& piece, const Box& box) {
      const auto& tensor = stretch.tensor;
      const auto bytes = box.volume() * size_of(tensor.dtype);
      const auto* const from = staging.data() + stretch.position(box.offset);
      std::span<const std::byte> packed(from, static_cast<std::size_t>(bytes));
      if (!stretch.packed(box)) {
        const auto into = scratch_.first(bytes);
        copy_strided(into.data(), packed_strides(box, tensor.dtype), from, stretch.strides,
                     box.size, size_of(tensor.dtype));
        packed = into;
      }
      const auto region = region_of(piece, box);
      if (piece.dtype != tensor.dtype) {
        const auto widened = cast_scratch_.first(region.num_bytes());
        convert(tensor.name, tensor.dtype, packed, piece.dtype, widened, Transform::kCastExact,
                box);
        packed = widened;
      }
      sink_->write(region, packed, record.written);
    });
  }

  static Dims packed_strides(const Box& box, DType dtype) {
    auto strides = row_major_strides(box.size);
    for (int d = 0; d < strides.rank(); ++d) strides[d] *= size_of(dtype);
    return strides;
  }

  static void convert(const std::string& name,
                      DType from_dtype,
                      std::span<const std::byte> from,
                      DType into_dtype,
                      std::span<std::byte> into,
                      Transform transform,
                      const Box& box) {
    require(transform == Transform::kCast || transform == Transform::kCastExact, ErrorKind::kBug,
            "{}: no conversion from {} to {} is planned", name, short_name(from_dtype),
            short_name(into_dtype));
    const auto rule = transform == Transform::kCast ? CastRule::kRound : CastRule::kExact;
    const auto refused = cast(from_dtype, from, into_dtype, into, rule);
    if (!refused) return;
    const auto* element = from.data() + *refused * size_of(from_dtype);
    fail(ErrorKind::kLayout, "{}: {} (an element of {}) {} in {}", name,
         element_value(from_dtype, element), to_string(box),
         rule == CastRule::kRound ? "overflows" : "would be rounded", short_name(into_dtype));
  }

  void run_tensor(const Segment& segment, const std::function<void(const Comparison&)>& compared) {
    const auto& planned = plan_.tensors[segment.index];
    const auto bytes = segment.end - segment.begin;
    const auto stretch = make_stretch(planned.tensor, segment.begin, segment.end);
    const auto staging = staging_.first(bytes);
    gather(planned.source, stretch, planned.on_read, staging);
    for (std::int64_t at = 0; at < bytes; at += kDigestBlock) {
      record.blocks.push_back(digest_block(
          staging.subspan(static_cast<std::size_t>(at),
                          static_cast<std::size_t>(std::min(kDigestBlock, bytes - at)))));
    }
    for (std::uint32_t r = 0; r < planned.replicas.size(); ++r) {
      const auto replica = replica_.first(bytes);
      gather(planned.replicas[r], stretch, planned.on_read, replica);
      compared({.tensor = segment.index,
                .replica = r,
                .element = stretch.begin,
                .expected = staging,
                .found = replica,
                .equal = std::memcmp(staging.data(), replica.data(), staging.size()) == 0});
    }
    if (sink_ == nullptr) return;
    for (const auto& cover : planned.targets) scatter(cover, stretch, staging);
  }

  void run_discard(const Segment& segment) {
    const auto& padding = plan_.discards[segment.index];
    visit_padding(padding, segment, [&](const Region& region, const Box& box) {
      const auto bytes = scratch_.first(region.num_bytes());
      source_.read(region, bytes, record.read);
      if (!all_zero(bytes)) nonzero_padding.push_back({.tensor = padding.tensor, .box = box});
    });
  }

  void run_fill(const Segment& segment) {
    const auto& padding = plan_.fills[segment.index];
    visit_padding(padding, segment, [&](const Region& region, const Box&) {
      const auto zeros = scratch_.first(region.num_bytes());
      std::ranges::fill(zeros, std::byte{0});
      sink_->write(region, zeros, record.written);
    });
  }

  template <typename Visit>
  static void visit_padding(const Padding& padding, const Segment& segment, Visit&& visit) {
    for (const auto& flat : split_flat_range(padding.box.size, segment.begin, segment.end)) {
      auto at = padding.at;
      auto box = flat.box;
      for (int d = 0; d < box.rank(); ++d) {
        at.offset += box.offset[d] * at.strides[d];
        box.offset[d] += padding.box.offset[d];
      }
      visit(Region{.at = at, .size = box.size, .element_size = size_of(padding.dtype)}, box);
    }
  }

  const CopyPlan& plan_;
  BoxSource& source_;
  BoxSink* sink_;
  Buffer staging_;
  Buffer scratch_;
  Buffer cast_scratch_;
  Buffer replica_;
};

}  // namespace

struct Execution::State {
  const CopyPlan* plan = nullptr;
  BoxSource* source = nullptr;
  BoxSink* sink = nullptr;
  ExecutorOptions options;
  Schedule schedule;
  BufferSizes sizes;

  std::vector<std::vector<Digest>> blocks;  // per tensor; each element is written by one task
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

  static std::int64_t bytes_of(const Segment& segment) {
    return segment.kind == Segment::Kind::kTensor ? segment.end - segment.begin : 0;
  }

  void store_blocks(const Task& task, const std::vector<Digest>& digests) {
    std::size_t at = 0;
    for (std::uint32_t s = task.first; s < task.first + task.count; ++s) {
      const auto& segment = schedule.segments[s];
      if (segment.kind != Segment::Kind::kTensor) continue;
      auto& into = blocks[segment.index];
      const auto first = static_cast<std::size_t>(segment.begin / kDigestBlock);
      const auto count =
          static_cast<std::size_t>((segment.end - segment.begin + kDigestBlock - 1) / kDigestBlock);
      require(at + count <= digests.size(), ErrorKind::kCorrupt,
              "the journal holds too few digests");
      std::copy_n(digests.begin() + static_cast<std::ptrdiff_t>(at), count,
                  into.begin() + static_cast<std::ptrdiff_t>(first));
      at += count;
    }
  }

  void compared(const Comparison& comparison) const {
    if (options.on_compared) return options.on_compared(comparison);
    if (comparison.equal) return;
    const auto& planned = plan->tensors[comparison.tensor];
    const auto mismatch = std::ranges::mismatch(comparison.expected, comparison.found);
    const auto element = comparison.element + (mismatch.in1 - comparison.expected.begin()) /
                                                  size_of(planned.tensor.dtype);
    fail(ErrorKind::kLayout, "{}: its second copy differs from the first, at element {}",
         planned.tensor.name, element);
  }

  void work() {
    try {
      auto* const resource =
          options.staging != nullptr ? options.staging : std::pmr::new_delete_resource();
      Worker worker(*plan, sizes, resource, *source, sink);
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
          with_context([&] { return describe(segment); }, [&] { worker.run(segment, report); });
          bytes += bytes_of(segment);
        }
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
  for (std::size_t i = 0; i < state.plan->tensors.size(); ++i) {
    const auto& tensor = state.plan->tensors[i].tensor;
    report.digests.push_back(digest_tensor(tensor.dtype, tensor.shape, state.blocks[i]));
  }
  return report;
}

StagingBudget staging_budget(const CopyPlan& plan, const ExecutorOptions& options) {
  const auto per_thread = buffer_sizes(plan).total();
  const auto cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  const auto wanted = options.threads > 0 ? options.threads : cores;
  const auto affordable = options.max_memory / per_thread;
  require(affordable >= 1, ErrorKind::kUsage,
          "{} MiB of memory are too few: one thread needs {} MiB of buffers",
          options.max_memory >> 20, (per_thread + (1 << 20) - 1) >> 20);
  const auto threads = static_cast<int>(std::min<std::int64_t>(wanted, affordable));
  return {.threads = threads, .bytes = threads * per_thread};
}

Execution Executor::submit(const CopyPlan& plan, BoxSource& source, BoxSink* sink) const {
  auto state = std::make_unique<Execution::State>();
  state->plan = &plan;
  state->source = &source;
  state->sink = sink;
  state->options = options_;
  state->schedule = make_schedule(plan, sink != nullptr);
  state->sizes = buffer_sizes(plan);
  const auto share_begin = [&](int share) {
    return static_cast<std::uint32_t>(state->schedule.tasks.size() *
                                      static_cast<std::size_t>(share) /
                                      static_cast<std::size_t>(options_.num_shares));
  };
  state->next_task = share_begin(options_.share);
  state->end_task = share_begin(options_.share + 1);
  for (auto i = state->next_task.load(); i < state->end_task; ++i) {
    const auto& task = state->schedule.tasks[i];
    for (std::uint32_t s = task.first; s < task.first + task.count; ++s)
      state->bytes_total += Execution::State::bytes_of(state->schedule.segments[s]);
  }
  for (const auto& planned : plan.tensors) {
    const auto bytes = planned.tensor.num_bytes();
    state->blocks.emplace_back(static_cast<std::size_t>((bytes + kDigestBlock - 1) / kDigestBlock));
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
        state->resumed_bytes += Execution::State::bytes_of(state->schedule.segments[s]);
      }
    }
    state->bytes_done = state->resumed_bytes;
  }
  const auto budget = staging_budget(plan, options_);
  state->running = budget.threads;
  for (int i = 0; i < budget.threads; ++i) {
    state->threads.emplace_back([running = state.get()] { running->work(); });
  }
  return Execution(std::move(state));
}

}  // namespace ferry::distckpt
