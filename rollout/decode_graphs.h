// CUDA graphs of steps in which every row decodes: the kernels of a forward pass of so many rows
// are captured once and then replayed, because the host takes longer to launch them than the GPU to
// run them. The number of rows is rounded up to a bucket; the added rows write nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace ferry::rollout {

struct DecodedRows {
  at::Tensor hidden{};  // [rows, hidden]
  at::Tensor routes{};  // StepRoutes::gather(), if they are kept
};

class DecodeGraphs {
 public:
  // `forward` computes that many rows from buffers that never move. Its second call for a number of
  // rows must not wait for anything on the host.
  explicit DecodeGraphs(std::function<DecodedRows(std::int64_t rows)> forward);
  ~DecodeGraphs();
  DecodeGraphs(const DecodeGraphs&) = delete;
  DecodeGraphs& operator=(const DecodeGraphs&) = delete;

  static std::int64_t bucket_of(std::int64_t rows);

  // Returns forward(rows) for a bucket of rows; the next replay of any bucket overwrites it.
  DecodedRows replay(std::int64_t rows);

 private:
  struct Graphs;
  std::function<DecodedRows(std::int64_t)> forward_;
  std::unique_ptr<Graphs> graphs_;
};

}  // namespace ferry::rollout
