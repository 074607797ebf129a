// Weights in blocks of FP8 that are changed when they are read: dequantised to fp32, changed, and
// quantised again by the scales that they have.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "converter/open/checkpoint.h"
#include "distckpt/base/box.h"
#include "distckpt/elements/dequantize.h"
#include "distckpt/plan/box_io.h"
#include "distckpt/plan/copy_plan.h"
#include "distckpt/plan/layout.h"

namespace ferry::converter {

// Elements of the weights that are changed, by their values.
struct RequantizedCounts {
  std::int64_t num_elements = 0;
  std::int64_t num_changed = 0;
  std::int64_t num_vanished = 0;  // that a change other than zero left as they were
  std::int64_t num_rescaled = 0;  // blocks with another scale
};

class RequantizedBlocks : public distckpt::ComputedBytes,
                          public std::enable_shared_from_this<RequantizedBlocks> {
 public:
  // Changes whole rows of a weight, from that element on. Thread-safe; the same every time.
  using Change = std::function<void(std::uint32_t, std::int64_t, std::span<float>)>;

  // `plan` reads weights, each with its scales behind it. Callers use replace().
  RequantizedBlocks(distckpt::CopyPlan plan, const distckpt::Dims& block, Change change)
      : plan_(std::move(plan)), block_(block), change_(std::move(change)) {}

  // Replaces the weights, indices in the tensors of a checkpoint that was opened with
  // keep_quantized, and their scales in its layout: a FileSource of it reads what they become.
  // `block` are the sizes of a block. Throws Error(kLayout) naming a weight that is not a matrix
  // in blocks of FP8 with scales of F32, BF16, F16 or exponents; reading throws it for one that
  // holds NaN, and for scales that are negative or not finite.
  static std::shared_ptr<RequantizedBlocks> replace(Checkpoint& checkpoint,
                                                    const std::vector<std::uint32_t>& weights,
                                                    const distckpt::Dims& block,
                                                    Change change);

  void compute(std::uint32_t index,
               distckpt::BoxSource& source,
               std::span<std::byte> into,
               std::vector<distckpt::ChecksumPart>& parts) const override;

  // Counts all rows; `source` reads those that nobody has read yet, in up to `threads` threads.
  RequantizedCounts count(distckpt::BoxSource& source, std::int64_t threads) const;

  // The bytes that a thread takes in compute() at most, with those of its result.
  std::int64_t thread_memory() const;

 private:
  // Some rows of blocks: elements, and their scales behind them.
  struct Band {
    std::uint32_t weight = 0;  // in the plan; the scales are the next tensor
    std::uint32_t tensor = 0;  // of the checkpoint
    distckpt::Box box{};
    std::int64_t size = 0;  // bytes
  };

  // The tensors that take the place of weight and scales.
  std::array<distckpt::TensorLayout, 2> add(std::uint32_t weight,
                                            std::uint32_t tensor,
                                            distckpt::Layout& layout);
  std::vector<float> values(const Band& band, std::span<const std::byte> stored) const;
  distckpt::BlockScales scales_of(const Band& band, std::span<const std::byte> stored) const;

  distckpt::CopyPlan plan_;
  distckpt::Dims block_;
  Change change_;
  std::vector<Band> bands_;
  mutable std::mutex mutex_;
  mutable std::vector<std::optional<RequantizedCounts>> counts_;  // by band
};

}  // namespace ferry::converter
