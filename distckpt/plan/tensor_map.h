// A TensorMap links boxes of stored tensors to boxes of a model's tensors. A model's tensors are
// named and shaped in Hugging Face terms, whatever stores them: QKV interleaving by query group,
// gate over up, stacked layers and padded rows are all boxes here; a transpose is the order of a
// link's axes, and parts that alternate are one more dimension of the tensor's grid.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"
#include "distckpt/elements/dequantize.h"
#include "distckpt/plan/layout.h"

namespace ferry::distckpt {

// The part that a tensor plays in the model. Only weights count for the model's digest.
enum class Role : std::uint8_t {
  kWeight,
  kDerived,  // computed from the configuration (inv_freq): recomputed, may be on one side only
  kPadding,  // rows beyond the vocabulary, where both sides of a plan hold them
  kState,    // of the optimizer: a master or a moment of a weight
};

// A tensor in Hugging Face terms: the unit of digests, proofs and reports.
struct ModelTensor {
  std::string name{};
  DType dtype = DType::kBF16;
  Shape shape{};
  Role role = Role::kWeight;
  // Parts whose elements take turns in the last dimension: element i of it is one of part i modulo
  // this. GPT-OSS has columns of gate and up so.
  std::int64_t interleaved = 1;

  std::int64_t num_bytes() const { return shape.product() * size_of(dtype); }
  // The shape in which plans and executors look at it: `shape`, or, where parts are interleaved,
  // one more dimension that counts them: [32, 128] of two parts is [32, 64, 2]. The elements lie
  // alike.
  Shape grid() const;
};

// Element for element, in row-major order, `stored_box` of stored tensor `stored` is `model_box` of
// model tensor `model`.
struct BoxLink {
  std::uint32_t model = 0;   // index among the model's tensors
  Box model_box{};           // in its shape, or in its grid where that has one dimension more
  std::uint32_t stored = 0;  // index in the Layout
  Box stored_box{};
  // A model tensor may be stored more than once (tied embeddings, replicas): copy 0 is what is
  // read, the others must hold the same bytes. Each copy covers the whole tensor.
  int copy = 0;
  // Else the two sizes are the same but for leading ones. Flat: stored_box is a row (all sizes but
  // the last are one) that holds the elements of model_box in row-major order.
  bool flat = false;
  // Else, if it is not empty: axes[i] is the dimension of model_box that the i-th of the last
  // axes.rank() dimensions of stored_box is, in any order. All other sizes are one. {1, 0} is a
  // transpose.
  Dims axes{};
  // Blocks of quantised elements and their scales: index into TensorMap::scales, or -1. Where an
  // element of the stored tensor packs several, stored_box counts the packs, and `axes` is given.
  int scale = -1;
  // A stored element is the model tensor's less this, rounded (Megatron-Core's zero-centred norms
  // hold a weight less one).
  int less = 0;

  // All of a tensor, which is stored as it is.
  static BoxLink whole(std::uint32_t model, std::uint32_t stored, const Shape& shape) {
    return {.model = model,
            .model_box = Box::whole(shape),
            .stored = stored,
            .stored_box = Box::whole(shape)};
  }
};

// The scales of a block-quantised tensor: one element for each block of `block` elements of the
// stored tensor, unpacked. A single one may have no dimensions.
struct ScaleLink {
  std::uint32_t stored = 0;
  Dims block{};  // [128, 128]
  Encoding encoding = Encoding::kE4M3;
  GlobalScale how = GlobalScale::kNone;
  std::uint32_t global = 0;  // the stored tensor of one element, unless `how` is kNone
};

// Elements of a stored tensor that hold nothing of the model: vocabulary padding. Zero (or one)
// when written; dropped, and reported if they are something else, when read. Padding that both
// sides of a plan hold is not lost: it becomes a tensor (promote_padding).
struct PaddingBox {
  std::uint32_t stored = 0;
  Box box{};
  bool ones = false;
};

struct TensorMap {
  std::vector<BoxLink> links{};
  std::vector<PaddingBox> padding{};
  std::vector<ScaleLink> scales{};
  // Stored elements of tensors that are not wanted: they are not read.
  std::vector<PaddingBox> left_out{};
};

// Names of the padding in stored tensors, equal where tensor and box are: "lm_head.weight [250:256,
// 0:32] (padding)".
std::set<std::string> padding_names(const std::vector<ModelTensor>& tensors,
                                    const Layout& layout,
                                    const TensorMap& map);

// Makes tensors of the padding of those names, appended to `tensors` in the order of the names.
void promote_padding(const std::set<std::string>& names,
                     const Layout& layout,
                     TensorMap& map,
                     std::vector<ModelTensor>& tensors);

// Makes tensors of the padding that both sides hold, so that it is carried over. The names of these
// tensors.
std::set<std::string> promote_shared_padding(const Layout& source_layout,
                                             TensorMap& source,
                                             const Layout& target_layout,
                                             TensorMap& target,
                                             std::vector<ModelTensor>& tensors);

// Keeps a part of the tensors: tensor i of those that `map` links is now tensor at[i], or gone. The
// stored elements of a tensor that is gone, its scales and its padding are then left out.
void restrict_links(TensorMap& map,
                    const Layout& layout,
                    const std::vector<std::optional<std::uint32_t>>& at);

}  // namespace ferry::distckpt
