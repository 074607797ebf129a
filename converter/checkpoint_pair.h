// Two checkpoints as one plan, in any formats and layouts: each tensor of the right one is a
// further copy of the left one's tensor of that name. Verify and diff are what is made of the
// comparison.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "converter/open/checkpoint.h"
#include "converter/progress.h"
#include "converter/stored/part.h"
#include "distckpt/execute/executor.h"
#include "distckpt/plan/copy_plan.h"

namespace ferry::converter {

struct PairOptions {
  std::filesystem::path left{};
  std::filesystem::path right{};
  std::optional<distckpt::Iteration> left_iteration{};
  std::optional<distckpt::Iteration> right_iteration{};
  std::filesystem::path hf_config{};  // for those of the two that are Megatron checkpoints
  Selection selection{};              // compare this part
  bool training_state = false;        // also optimizers, where both sides have one
  int threads = 0;
  std::int64_t max_memory = std::int64_t{192} << 20;
};

// A tensor that cannot be compared, element by element.
struct UnpairedTensor {
  enum class Kind { kOnlyLeft, kOnlyRight, kShape, kDType };
  Kind kind = Kind::kOnlyLeft;
  std::string tensor{};
  std::string detail{};  // kShape, kDType: both of them
};
std::string_view to_string(UnpairedTensor::Kind kind);  // "only_left"
std::string describe(const UnpairedTensor& tensor);     // "is on the left only"

class CheckpointPair {
 public:
  // Opens both and plans the comparison; reads no tensor but derived ones. Throws Error as `open`
  // does. `without_adapter` is OpenOptions' of both; notes() then say it.
  explicit CheckpointPair(const PairOptions& options, bool without_adapter = false);

  const Checkpoint& left() const { return left_; }
  const Checkpoint& right() const { return right_; }

  // The tensors that both hold, in the order of the left one; also padding that both hold.
  std::size_t num_tensors() const { return num_tensors_; }
  const distckpt::ModelTensor& tensor(std::size_t index) const {
    return plan_.tensors[index].tensor;
  }
  std::int64_t num_bytes() const;
  const std::vector<UnpairedTensor>& unpaired() const { return unpaired_; }
  // True if a side holds the tensor less one, rounded: it is compared so.
  bool compared_less_one(std::size_t index) const;
  // True if both sides are quantised, and compared as they are.
  bool keeps_quantized() const { return keep_quantized_; }

  // The things that were not compared, and why; after `compare` also padding that is not zero.
  const std::vector<std::string>& notes() const { return notes_; }

  // Calls `compared` with every stretch of every tensor: the left one's elements are `expected`,
  // the right one's `found`. By several threads at a time. Throws Error(kLayout) for a side whose
  // own second copy of a tensor (a tied head) differs from the first. With `whole_tensors` one
  // thread goes through a tensor from front to back.
  void compare(const std::function<void(const distckpt::Comparison&)>& compared,
               const ProgressFunction& progress,
               bool whole_tensors = false);

 private:
  Checkpoint open_side(const std::filesystem::path& path,
                       std::optional<distckpt::Iteration> iteration);
  void compare_experts_in_one_form();
  void add_training_states();
  void promote_shared_padding();
  void widen_fp32();
  void note_selection();
  void make_plan();
  void only_one_side(const distckpt::ModelTensor& tensor,
                     UnpairedTensor::Kind kind,
                     const Location& location);
  bool same_kind(const distckpt::ModelTensor& left, const distckpt::ModelTensor& right);

  PairOptions options_;
  bool keep_quantized_ = false;
  bool without_adapter_ = false;
  Checkpoint left_;
  Checkpoint right_;
  bool hf_config_used_ = false;
  distckpt::StorageId split_ = 0;  // storages from here on are the right one's
  distckpt::CopyPlan plan_;        // tensors that both hold, then second copies of the right one
  std::size_t num_tensors_ = 0;
  std::vector<std::uint32_t>
      right_replica_;  // per tensor: which of its replicas is the right one's
  std::vector<UnpairedTensor> unpaired_;
  std::vector<std::string> notes_;
};

}  // namespace ferry::converter
