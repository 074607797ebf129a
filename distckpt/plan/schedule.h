// A plan cut into tasks: the unit that a thread takes, a buffer holds and the journal logs. It
// depends on the plan and on what is done with the elements, so that a resumed run cuts it the
// same way, whatever its threads and memory.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/elements/digest.h"
#include "distckpt/plan/copy_plan.h"

namespace ferry::distckpt {

// A task is at most this long: small enough that a buffer read is still in the cache when it is
// digested and written.
inline constexpr std::int64_t kTaskBytes = 2 * kDigestBlock;

// Elements [begin, end) of a tensor, in row-major order.
struct FlatRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// A tensor that a file holds in another order than the model (experts that lie transposed) is gone
// through slab by slab: dimensions from `dim` on, of which a slab holds `rows` of the first. A slab
// is read once, and each stretch of kTaskBytes is taken out of it in memory.
struct SlabCut {
  int dim = 0;
  std::int64_t rows = 0;
  std::int64_t bytes = 0;  // of the largest slab

  // The elements of the slab that holds one of them.
  FlatRange slab_of(const Shape& grid, std::int64_t element) const;
};

// A slab is at most this long.
inline constexpr std::int64_t kSlabBytes = std::int64_t{32} << 20;

// Nothing for tensors whose stretches are read as they are: those that lie in the model's order,
// small ones, and those with slabs or rows too long to hold.
std::optional<SlabCut> slab_cut(const PlannedTensor& planned);

// The order in which the elements of a cover lie, by its first piece of another order than the
// model's: dimension i of that order is dimension order[i] of the grid. Empty: all lie as the
// model's do.
std::vector<int> order_of(const Cover& cover);

// The part of `box` that is box `part` of it in the order of `order`.
Box part_in_order(const Box& box, const std::vector<int>& order, const Box& part);

// Calls visit with parts of `box`, at most `most` elements each, that follow each other in the
// order of `order` (empty: row-major).
void visit_tiles(const Box& box,
                 const std::vector<int>& order,
                 std::int64_t most,
                 const std::function<void(const Box&)>& visit);

// Bytes [begin, end) of a tensor, or elements [begin, end) of a piece of a target (in the order of
// the source: order_of) or of a padding region.
struct Segment {
  enum class Kind : std::uint8_t { kTensor, kPiece, kDiscard, kFill };
  Kind kind = Kind::kTensor;
  std::uint32_t index = 0;
  std::uint32_t cover = 0;  // of a piece: PlannedTensor::targets[cover][piece]
  std::uint32_t piece = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// Consecutive segments, together at most kTaskBytes long, but for a segment of slabs.
struct Task {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
};

struct Schedule {
  std::vector<Segment> segments;
  std::vector<Task> tasks;
};

// The part of a tensor that a thread goes through before another may be ahead of it.
enum class InOrder : std::uint8_t {
  kStretches,  // as is fastest to read and write
  kSlabs,      // a slab at most: somebody takes the elements in the model's order
  kSlabbed,    // all of one that has slabs
  kTensors,    // all of it
};

// `writes`: also the target's padding.
Schedule make_schedule(const CopyPlan& plan, bool writes, InOrder order = InOrder::kStretches);

// Goes through the pieces of the targets rather than through the tensors: of these only what is
// written has to be read.
Schedule make_target_schedule(const CopyPlan& plan);

// The buffers that one thread needs to run any task of the plan, in bytes.
struct BufferSizes {
  std::int64_t staging = kTaskBytes;
  std::int64_t scratch = kTaskBytes;
  std::int64_t replica = 0;
  std::int64_t slab = 0;  // each of
  std::int64_t slabs = 0;
  std::int64_t total() const { return staging + 2 * scratch + replica + slabs * slab; }
};

enum class Staged : std::uint8_t {
  kStretches,  // of tensors, from slabs that are read and written
  kAmended,    // the same; elements are changed between, so that a slab is not both
  kPieces,     // as a target's files hold them, without slabs
};
BufferSizes buffer_sizes(const CopyPlan& plan, Staged staged = Staged::kStretches);

}  // namespace ferry::distckpt
