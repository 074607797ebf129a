// CUDA graphs of steps in which every row decodes: what a forward pass launches for so many rows is
// captured once and then replayed, since launching it takes the host longer than the GPU needs.
// Rows are rounded up to a bucket; those that nobody reads write nowhere.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace ferry::rollout {

class DecodeGraphs {
 public:
  // `forward` computes that many rows out of buffers that never move, and waits for nothing on the
  // host once it has run for as many before.
  explicit DecodeGraphs(std::function<at::Tensor(std::int64_t rows)> forward);
  ~DecodeGraphs();
  DecodeGraphs(const DecodeGraphs&) = delete;
  DecodeGraphs& operator=(const DecodeGraphs&) = delete;

  static std::int64_t bucket_of(std::int64_t rows);

  // What forward(rows) gives, for a bucket of rows; the next replay of any bucket writes over it.
  at::Tensor replay(std::int64_t rows);
  // Forgets all graphs: the buffers or the weights have moved.
  void reset();

 private:
  struct Graphs;
  std::function<at::Tensor(std::int64_t)> forward_;
  std::unique_ptr<Graphs> graphs_;
};

}  // namespace ferry::rollout
