// A CopyPlan carries every element of a source layout to a target layout, exactly once. It is a
// pure function of metadata: all ranks compute the same one; it is the dry run, the unit of
// resuming and the unit of checksums.
//
// A plan is kept per model tensor, as the pieces in which the source holds it and the pieces in
// which the target wants it. Their pairwise intersections are the rectangular copies (copy_ops).
// Executors that digest run through the model tensor in row-major order, read each source piece
// once and write each target piece once; executors between ranks run the copies.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"
#include "distckpt/elements/dequantize.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/tensor_map.h"

namespace ferry::distckpt {

enum class Transform : std::uint8_t {
  kNone,
  kCast,        // to nearest, ties to even; a finite value that becomes infinite is an error
  kCastExact,   // a value that changes is an error
  kDequantize,  // value * scale of its block
};

// Scales that belong to a piece: scale (i, j) is that of elements [i * block[0], ...) x
// [j * block[1], ...) of the model tensor's grid.
struct ScalePiece {
  Placement at{};  // of scale (0, 0); strides has the rank of block
  DType dtype = DType::kF32;
  Dims block{};
  Encoding encoding = Encoding::kE4M3;
  GlobalScale how = GlobalScale::kNone;
  Placement global{};  // of the F32
  int packed = -1;     // the dimension whose elements are packed: it lies from byte to byte
};

// A box of a model tensor's grid, and where its elements lie.
struct Piece {
  Box box{};       // in the grid
  Placement at{};  // strides has the rank of box; in a packed dimension, from pack to pack
  DType dtype = DType::kBF16;  // of the stored elements
  int scale = -1;              // index into CopyPlan::scales
  int less = 0;                // BoxLink::less
};

// Pieces that together cover a model tensor exactly once.
using Cover = std::vector<Piece>;

struct PlannedTensor {
  ModelTensor tensor{};
  Cover source{};
  std::vector<Cover>
      replicas{};  // further copies in the source: must hold the same bytes as `source`
  std::vector<Cover> targets{};          // none in a plan that only reads
  Transform on_read = Transform::kNone;  // stored source elements -> elements of `tensor`
  // The elements are digested and compared less this: what all pieces are less by, if it is the
  // same of all, so that nothing is rounded; else 0.
  int less = 0;
};

// A region of one side that holds nothing of the model.
struct Padding {
  std::string tensor{};  // the stored tensor
  Box box{};             // in it
  Placement at{};
  DType dtype = DType::kBF16;
  bool ones = false;  // else zeros
};

struct CopyPlan {
  std::vector<PlannedTensor> tensors{};
  std::vector<ScalePiece> scales{};
  std::vector<Padding> discards{};  // source padding: read, and reported if it is not so
  std::vector<Padding> fills{};     // target padding

  std::int64_t num_bytes() const;  // of the model's tensors
};

// One rectangular copy: a box of a model tensor, from one source placement (and its scales) to one
// target placement. `transform` gives elements of the model tensor; where the target has another
// dtype than those, they are then cast to it as kCastExact.
struct CopyOp {
  Box box{};  // in the model tensor
  Placement source{};
  Placement target{};
  DType source_dtype = DType::kBF16;
  DType dtype = DType::kBF16;  // of the model tensor
  DType target_dtype = DType::kBF16;
  Transform transform = Transform::kNone;
  int scale = -1;
};

// One side of a plan. `map` links `layout`'s tensors to `tensors` by index.
struct PlanSide {
  const Layout* layout = nullptr;
  const TensorMap* map = nullptr;
};

// Refuses, by Error(kLayout) that names tensor and box, unless every element of every source tensor
// is consumed and every element of every model tensor is found exactly once. Where the source holds
// another dtype than the model tensor has, `cast` says how it is read: kCastExact undoes a
// widening, kCast carries out a requested change of dtype.
CopyPlan plan_read(const std::vector<ModelTensor>& tensors,
                   const PlanSide& source,
                   Transform cast = Transform::kCastExact);

// plan_read, and the same of the target: every element of every target tensor is written exactly
// once.
CopyPlan plan_copy(const std::vector<ModelTensor>& tensors,
                   const PlanSide& source,
                   const PlanSide& target,
                   Transform cast = Transform::kCastExact);

// The part that writes to storages which `keep` takes: other targets, and tensors that have none
// left, are dropped. What is read of a tensor is still all of it.
CopyPlan keep_targets(CopyPlan plan, const std::function<bool(StorageId)>& keep);

// The rectangular copies of one tensor, in the order of its targets.
std::vector<CopyOp> copy_ops(const PlannedTensor& planned);

// The part `box` (a box inside piece.box) of a piece whose elements are not packed.
Placement place(const Piece& piece, const Box& box);

}  // namespace ferry::distckpt
