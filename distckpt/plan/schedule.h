// A plan cut into tasks: the unit that a thread takes, a buffer holds and the journal logs. It
// depends on the plan alone, so that a resumed run cuts it the same way, whatever its threads and
// memory.
#pragma once

#include <cstdint>
#include <vector>

#include "distckpt/elements/digest.h"
#include "distckpt/plan/copy_plan.h"

namespace ferry::distckpt {

// A task is at most this long: small enough that a buffer read is still in the cache when it is
// digested and written.
inline constexpr std::int64_t kTaskBytes = 2 * kDigestBlock;

// Bytes [begin, end) of a tensor, or elements [begin, end) of a piece of a target or of a padding
// region.
struct Segment {
  enum class Kind : std::uint8_t { kTensor, kPiece, kDiscard, kFill };
  Kind kind = Kind::kTensor;
  std::uint32_t index = 0;
  std::uint32_t cover = 0;  // of a piece: PlannedTensor::targets[cover][piece]
  std::uint32_t piece = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Consecutive segments, together at most kTaskBytes long.
struct Task {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

struct Schedule {
  std::vector<Segment> segments;
  std::vector<Task> tasks;
};

// `writes`: also the target's padding.
Schedule make_schedule(const CopyPlan& plan, bool writes);

// Goes through the pieces of the targets rather than through the tensors: of these only what is
// written has to be read.
Schedule make_target_schedule(const CopyPlan& plan);

// The buffers that one thread needs to run any task of the plan, in bytes.
struct BufferSizes {
  std::int64_t staging = kTaskBytes;
  std::int64_t scratch = kTaskBytes;
  std::int64_t replica = 0;
  std::int64_t total() const { return staging + 2 * scratch + replica; }
};
BufferSizes buffer_sizes(const CopyPlan& plan);

}  // namespace ferry::distckpt
