// A checkpoint that is about to be written: placed before anything is copied, finished afterwards.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "distckpt/checksum_ledger.h"
#include "distckpt/copy_plan.h"
#include "distckpt/file_box_io.h"
#include "distckpt/layout.h"
#include "distckpt/tensor_map.h"

namespace ferry::converter {

class Target {
 public:
  virtual ~Target() = default;

  distckpt::PlanSide side() const { return {.layout = &layout_, .map = &links_}; }
  const distckpt::Layout& layout() const { return layout_; }
  virtual std::vector<distckpt::ChecksumRange> protected_ranges() const { return {}; }

  // As the functions of distckpt/tensor_map.h. `tensors` are those of the plan, and stay as they
  // are.
  std::set<std::string> padding_names(const std::vector<distckpt::ModelTensor>& tensors) const {
    return distckpt::padding_names(tensors, links_);
  }
  void promote_padding(const std::set<std::string>& names,
                       std::vector<distckpt::ModelTensor> tensors) {
    distckpt::promote_padding(names, layout_, links_, tensors);
  }

  // Creates the folders that the files of layout() lie in.
  virtual void prepare() const = 0;

  // Everything that is not a tensor's bytes: headers, indices, carried files. Durable when it
  // returns.
  virtual void finish(distckpt::FileSink& sink) const = 0;

 protected:
  distckpt::Layout layout_;
  distckpt::TensorMap links_;
};

}  // namespace ferry::converter
