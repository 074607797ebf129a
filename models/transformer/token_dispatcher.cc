#include "models/transformer/token_dispatcher.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>

#include "models/tensor_parallel/mappings.h"

namespace ferry::models {
namespace {

using Counts = std::vector<std::int64_t>;

std::int64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

// The rows of each expert, int64.
at::Tensor counts_of(const at::Tensor& ends) {
  return at::diff(ends.to(at::kLong), 1, -1, at::zeros({1}, ends.options().dtype(at::kLong)));
}

// Sorts `rows` rows, sorted by (source, expert), `counts` [sources, experts] of them, by (expert,
// source).
ExpertOrder experts_first(const at::Tensor& counts, std::int64_t rows) {
  const auto experts = at::arange(counts.size(1), counts.options());
  const auto of_rows = at::repeat_interleave(experts.expand_as(counts).flatten(), counts.flatten(),
                                             0, rows);  // known, so that nobody asks the device
  return expert_order(of_rows, {0, counts.size(1)});
}

// A stream of this thread's on `device`.
c10::Stream stream_beside(c10::Device device) {
  static thread_local std::optional<c10::Stream> stream;
  if (!stream || stream->device() != device)
    stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  return *stream;
}

// Rows in another order. The backward gathers the gradient by the inverse; the backward of
// index_select would add rows up, on a GPU in any order.
class Permute : public torch::autograd::Function<Permute> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor& rows,
                            const at::Tensor& order,
                            const at::Tensor& inverse) {
    context->save_for_backward({inverse});
    return rows.index_select(0, order);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0].index_select(0, context->get_saved_variables()[0]), at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

TokenDispatcher::TokenDispatcher(const ModelSetup& setup, const at::Tensor& ends)
    : ep_(setup.mesh.ep()),
      etp_(setup.mesh.etp()),
      bitwise_(setup.alignment() == Alignment::kBitwise) {
  if (ends.is_cuda())
    exchange_beside(ends);
  else
    exchange(ends);
}

void TokenDispatcher::exchange(const at::Tensor& ends) {
  const auto by_rank = counts_of(ends).view({ep_.size(), -1});
  // The rows that every rank sends to this one and its etp peers.
  arriving_ = etp_.all_gather(ep_.all_to_all(by_rank.contiguous()));
  counts_ = at::cat({by_rank.sum(1), arriving_.sum(1)});
}

// On a stream of its own, so that what the caller does next does not wait, nor the host for that.
void TokenDispatcher::exchange_beside(const at::Tensor& ends) {
  const c10::impl::VirtualGuardImpl device(ends.device().type());
  const auto current = device.getStream(ends.device());
  const auto beside = stream_beside(ends.device());
  c10::Event ready(ends.device().type());
  ready.record(current);
  ready.block(beside);
  ends.record_stream(beside);
  const c10::StreamGuard guard(beside);
  exchange(ends);
  arriving_.record_stream(current);
  const auto on_device = counts_;
  counts_ = at::empty(on_device.sizes(), at::TensorOptions(at::kLong).pinned_memory(true));
  counts_.copy_(on_device, /*non_blocking=*/true);
  known_.emplace(ends.device().type());
  known_->record(beside);
}

void TokenDispatcher::wait() {
  if (known_) {
    known_->synchronize();  // what the current stream begins from here on finds them, too
    known_.reset();
  }
  const auto* const host = counts_.const_data_ptr<std::int64_t>();
  send_.assign(host, host + ep_.size());
  Counts blocks;  // rows of each etp rank
  for (int rank = 0; rank < etp_.size(); ++rank) {
    const auto* const from = host + std::int64_t{1 + rank} * ep_.size();
    const Counts sources(from, from + ep_.size());
    blocks.push_back(sum(sources));
    if (rank == etp_.rank()) receive_ = sources;
  }
  arrived_ = sum(receive_);
  block_ = *std::ranges::max_element(blocks);
  places_ = experts_first(arriving_, sum(blocks));
  if (etp_.size() == 1) return;
  // Blocks are padded to one length while they are gathered.
  std::vector<at::Tensor> rows;
  for (int rank = 0; rank < etp_.size(); ++rank) {
    const auto begin = rank * block_;
    rows.push_back(at::arange(begin, begin + blocks[static_cast<std::size_t>(rank)], at::kLong));
  }
  unpadded_ = at::cat(rows).to(arriving_.device());
}

at::Tensor TokenDispatcher::dispatch(const at::Tensor& rows) const {
  auto arrived = all_to_all(rows, ep_, send_, receive_);
  if (etp_.size() > 1) {
    const auto padded = at::constant_pad_nd(arrived, {0, 0, 0, block_ - arrived_});
    arrived = gather_from_sequence_parallel_region(padded, etp_).index_select(0, unpadded_);
  }
  return Permute::apply(arrived, places_.order, places_.inverse);
}

at::Tensor TokenDispatcher::combine(const at::Tensor& results) const {
  auto rows = results;
  if (etp_.size() > 1 && bitwise_)
    rows = gather_from_tensor_model_parallel_region(rows, etp_, /*replicated=*/false);
  rows = Permute::apply(rows, places_.inverse, places_.order);
  if (etp_.size() > 1) {
    const auto padded = at::zeros({etp_.size() * block_, rows.size(1)}, rows.options())
                            .index_copy(0, unpadded_, rows);
    const auto mine = bitwise_ ? padded.narrow(0, etp_.rank() * block_, block_)
                               : reduce_scatter_to_sequence_parallel_region(padded, etp_);
    rows = mine.narrow(0, 0, arrived_);
  }
  return all_to_all(rows, ep_, receive_, send_);
}

}  // namespace ferry::models
