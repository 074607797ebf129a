// Sends a batch of routed rows to the ranks of their experts, and brings the results back
// (Megatron-Core's MoEAlltoAllTokenDispatcher). A token's row goes once to each rank that has
// experts of its choices, and so does its gradient.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "models/kernels/experts/experts.h"
#include "models/transformer/layer_context.h"
#include "models/transformer/router.h"

namespace ferry::models {

class TokenDispatcher {
 public:
  // x [tokens, hidden] and its routing. Ranks begin to tell each other their numbers of rows, on a
  // GPU beside what the current stream does next.
  TokenDispatcher(const ModelSetup& setup, const at::Tensor& x, const Routing& routing);

  // Sends the rows, which travel while the caller computes what needs none of them; so do their
  // gradients. Waits for the numbers: the one place at which the host waits for the device. Called
  // once, before the other functions.
  void send();
  // -> the rows for this rank's experts, those of the first one first. Differentiable by x.
  at::Tensor receive();

  // The end of the rows of each of this rank's experts, int32.
  const at::Tensor& ends() const;

  // Results of the rows of receive(), as Experts::forward() has them -> [tokens, hidden], the sums
  // over each token's choices, weighed. Differentiable by the results and the routing's weights.
  // kBitwise: results come back one by one and are summed in the order of the choices, so that the
  // sum does not depend on the ranks of the experts. kFast: a rank sums what it has of a token.
  at::Tensor combine(const at::Tensor& results) const;

  struct Route;  // where rows go, and whence they come

 private:
  void exchange(const at::Tensor& counts);
  void exchange_beside(const at::Tensor& counts);
  void wait();

  std::shared_ptr<Route> route_;
  std::int64_t local_;  // experts of a rank
  at::Tensor x_, weights_;
  at::Tensor numbers_;               // of the host, once they are known; see exchange()
  std::optional<c10::Event> known_;  // on a GPU
  at::Tensor rows_, choices_;        // to be sent, and others behind them
  at::Tensor arriving_;              // there once Route::moved is
};

}  // namespace ferry::models
