// Sends a batch of routed rows to the ranks of their experts, and brings the results back
// (Megatron-Core's MoEAlltoAllTokenDispatcher).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "models/kernels/experts/experts.h"
#include "models/transformer/layer_context.h"

namespace ferry::models {

class TokenDispatcher {
 public:
  // `ends` [experts of the layer], int32: where the rows of each expert end among this rank's rows,
  // sorted by expert. Ranks begin to tell each other their numbers of rows, on a GPU beside what
  // the caller does next. The caller must not write `ends` before wait().
  TokenDispatcher(const ModelSetup& setup, const at::Tensor& ends);

  // Waits for these numbers: the one place at which the host waits for the device. The other
  // functions follow it.
  void wait();

  // This rank's rows -> rows for this rank's experts, those of the first one first. Differentiable.
  at::Tensor dispatch(const at::Tensor& rows) const;

  // The results of this rank's experts -> the results of this rank's rows. Differentiable.
  at::Tensor combine(const at::Tensor& results) const;

  // The end of the rows of each of this rank's experts, int32.
  const at::Tensor& ends() const { return places_.ends; }

 private:
  void exchange(const at::Tensor& ends);
  void exchange_beside(const at::Tensor& ends);

  const ProcessGroup& ep_;
  const ProcessGroup& etp_;
  bool bitwise_;
  at::Tensor arriving_;  // [etp ranks * sources, local experts] rows
  at::Tensor counts_;    // of the host: rows to each rank, then of each row of arriving_
  std::optional<c10::Event> known_;           // counts_, on a GPU
  std::vector<std::int64_t> send_, receive_;  // rows to and from each rank of ep_
  std::int64_t arrived_ = 0;
  std::int64_t block_ = 0;  // rows of the etp rank that has the most
  ExpertOrder places_;      // of the rows that have arrived
  at::Tensor unpadded_;
};

}  // namespace ferry::models
