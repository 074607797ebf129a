// Reads tensors of a checkpoint one after another, ahead of whoever takes them: in Hugging Face
// terms or as Megatron-Core's ranks hold them, whatever stores them. A plan of all of them is made
// once, and run in batches of neighbours, so that memory is bounded by the batches that are read
// ahead.
//
//   TensorStream stream(checkpoint, whole_tensors(*checkpoint, {}), {});
//   while (const auto batch = stream.next_batch()) stream.start(memory of its items);
//   const auto done = stream.wait({});  // the items of the first batch that was started
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "converter/open/checkpoint.h"
#include "converter/progress.h"
#include "converter/stored/part.h"
#include "distckpt/execute/executor.h"
#include "models/spec/parallel_config.h"

namespace ferry::converter {

// Boxes of one tensor, to be read into one piece of memory.
struct WantedTensor {
  std::string name{};  // of the tensor: a Hugging Face name, or a key of Megatron-Core's modules
  distckpt::DType dtype = distckpt::DType::kBF16;
  distckpt::Shape shape{};             // of the memory, which is row-major
  std::vector<distckpt::Box> boxes{};  // lie in it one after another, along the first dimension

  std::int64_t num_bytes() const { return shape.product() * size_of(dtype); }
};

struct WantedTensors {
  bool megatron_names = false;
  models::ParallelConfig parallel{};  // of Megatron's names: pads the vocabulary
  std::vector<WantedTensor> tensors{};
};

// Every tensor of the model whose Hugging Face name is selected, whole, in the order of the model.
// Throws Error(kUsage) for a pattern that matches none.
WantedTensors whole_tensors(const Checkpoint& checkpoint, const Selection& selection);

// The parameters that one rank of a mesh holds, as Megatron-Core's modules have them: each layer
// and each expert under a key of its own ("decoder.layers.3.mlp.linear_fc1.weight"), in the order
// of the modules. Throws Error(kUsage) for a rank that the mesh lacks, for a mesh over which the
// model cannot be split, and for a pattern that matches no key of the whole model: of one that
// other ranks match this one has nothing.
WantedTensors tensors_of_rank(const Checkpoint& checkpoint,
                              const models::ParallelConfig& parallel,
                              int rank,
                              const Selection& selection);

// A box of one tensor, or all of it; either kind of name. Throws Error(kNotFound) for a name that
// the model lacks, and Error(kUsage) for a box that leaves the tensor.
WantedTensors box_of_tensor(const Checkpoint& checkpoint,
                            const std::string& name,
                            const std::optional<distckpt::Box>& box);

struct StreamOptions {
  std::optional<distckpt::DType> dtype{};  // casts weights to nearest. Default: each keeps its own
  int threads = 0;                         // 0: one per core
  std::int64_t max_memory = std::int64_t{192} << 20;  // of staging buffers, of one batch
  // Bytes of tensors that are being read or wait to be taken. A larger tensor is read alone.
  std::int64_t read_ahead = std::int64_t{256} << 20;
};

class TensorStream {
 public:
  // Plans; reads nothing yet. Throws Error as plan_copy() does.
  TensorStream(std::shared_ptr<const Checkpoint> checkpoint,
               WantedTensors wanted,
               const StreamOptions& options);
  ~TensorStream();  // cancels and waits
  TensorStream(const TensorStream&) = delete;
  TensorStream& operator=(const TensorStream&) = delete;

  // Their dtypes are those after a cast.
  const std::vector<WantedTensor>& tensors() const { return wanted_.tensors; }

  struct Range {
    std::size_t begin = 0;
    std::size_t end = 0;
  };

  // The tensors to be started next; nothing while enough of them are ahead, or if all were started.
  std::optional<Range> next_batch() const;

  // Begins to read next_batch() into row-major memory, one pointer for each of its tensors. The
  // memory must outlive the stream or the batch, whichever ends first.
  void start(std::vector<std::byte*> memory);

  // Waits for the batch that was started first. Nothing if none is left; then all that was read
  // whole has the checksums that its files state. `progress` may end it by returning false.
  std::optional<Range> wait(const ProgressFunction& progress);

  // Says that a batch which wait() returned needs no room any more.
  void release(const Range& batch);

 private:
  struct Batch;
  struct Part {  // of a target: PlannedTensor::targets[cover][piece]
    std::uint32_t tensor = 0;
    std::uint32_t cover = 0;
    std::uint32_t piece = 0;
  };

  void cancel();  // all that is under way, at once
  void make_plan();
  void cut_into_batches();
  distckpt::CopyPlan plan_of(const Range& range) const;
  std::int64_t bytes_of(const Range& range) const;

  std::shared_ptr<const Checkpoint> checkpoint_;
  WantedTensors wanted_;
  StreamOptions options_;
  distckpt::CopyPlan plan_;
  std::vector<std::vector<Part>> parts_;           // by wanted tensor
  std::vector<std::vector<std::uint32_t>> fills_;  // likewise: indices into plan_.fills
  std::vector<Range> batches_;
  std::size_t next_ = 0;    // of batches_
  std::int64_t ahead_ = 0;  // bytes started and not released
  std::int64_t done_ = 0;   // bytes of batches that wait() returned
  std::int64_t total_ = 0;
  std::unique_ptr<distckpt::FileSource> source_;
  std::deque<std::unique_ptr<Batch>> running_;
};

}  // namespace ferry::converter
