// The places of a rank's parameters in the flat buckets of Megatron-Core's distributed optimizer. A
// checkpoint does not store them: they follow from the order in which modules register their
// parameters (megatron/core/distributed/param_and_grad_buffer.py).
#pragma once

#include <cstdint>
#include <vector>

#include "converter/families/model_map.h"
#include "converter/optimizer/sharded_state.h"
#include "models/spec/parallel_config.h"

namespace ferry::converter {

// The model parallel ranks number from 0: for dense parameters tensor parallel rank fastest, then
// the pipeline's stage; for experts expert tensor parallel, expert parallel, stage.
enum class ParameterGroup : std::uint8_t { kDense, kExpert };

// Local experts share a module or have one each; which of the two a run used shows in the
// sizes alone.
enum class ExpertOrder : std::uint8_t { kGrouped, kSequential };

struct BucketParameter {
  RankTensor tensor{};
  bool copy = false;       // another stage's or rank's copy of a tensor: its state repeats
  std::int64_t begin = 0;  // its first element in the buckets of the buffer, one after the other
  std::int64_t size = 0;   // elements
};

class OptimizerBuckets {
 public:
  // `parallel` is the layout of the run that wrote the checkpoint. Throws Error(kUsage) if it does
  // not fit the model.
  OptimizerBuckets(const ModelMap& map, const models::ParallelConfig& parallel);

  int num_ranks(ParameterGroup group) const;
  int num_chunks() const { return num_chunks_; }  // of the model on each rank: one buffer for each

  bool has_parameters(ParameterGroup group, int rank, int chunk) const;

  // Places the parameters that model parallel rank `rank` keeps in the buffer of its model chunk
  // `chunk`: in reverse order of registration, each at a multiple of 64 elements of its bucket.
  // `buckets` are the sizes of the buckets without the padding at their ends. Throws Error(kLayout)
  // if the parameters do not fill the buckets.
  std::vector<BucketParameter> place(ParameterGroup group,
                                     ExpertOrder order,
                                     int rank,
                                     int chunk,
                                     const std::vector<std::int64_t>& buckets) const;

 private:
  struct Registered;
  int group_size(ParameterGroup group) const;
  std::vector<Registered> registered(ParameterGroup group,
                                     ExpertOrder order,
                                     int rank,
                                     int chunk) const;

  const ModelMap& map_;
  models::ParallelConfig parallel_;
  std::vector<std::vector<RankTensor>> ranks_;
  int num_chunks_ = 1;
};

}  // namespace ferry::converter
