#include "trainer/optimizer/distributed_data_parallel.h"

#include <ATen/ops/cat.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "models/finalize_model_grads.h"
#include "models/kernels/product/main_grad.h"

namespace ferry::trainer {

using models::GPTModel;
using models::ParameterSpec;

// After a leaf has got its gradient of one backward pass.
class DistributedDataParallel::Hook : public models::MainGradHook {
 public:
  Hook(DistributedDataParallel& owner, std::size_t buffer, std::size_t bucket, BufferSlot slot)
      : owner_(owner), buffer_(buffer), bucket_(bucket), slot_(slot) {}

  void operator()(const at::Tensor& leaf) override {
    if (leaf.grad().defined()) main_grad().add_(leaf.grad());
    leaf.mutable_grad() = at::Tensor();
    owner_.accumulated(buffer_, bucket_);
  }
  at::Tensor main_grad() const override { return owner_.buffers_[buffer_].main_grad(slot_); }

 private:
  DistributedDataParallel& owner_;
  std::size_t buffer_, bucket_;
  BufferSlot slot_;
};

struct DistributedDataParallel::Progress {
  bool last_backward = false;
  std::vector<std::size_t> missing{};  // leaves of each bucket
  std::size_t next = 0;                // bucket to be summed: all ranks go by their order
};

namespace {

bool is_embedding(const ParameterSpec& spec) {
  return spec.key == models::kWordEmbeddings;
}

const ParameterSpec& spec_of(const models::Parameters& parameters, std::size_t leaf) {
  return parameters.all()[parameters.leaves()[leaf].parameters[0]].spec;
}

}  // namespace

DistributedDataParallel::DistributedDataParallel(std::vector<GPTModel*> chunks,
                                                 DistributedDataParallelConfig config)
    : chunks_(std::move(chunks)), config_(config) {
  for (std::size_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    auto& parameters = chunks_[chunk]->parameters();
    const auto& leaves = parameters.leaves();
    const auto dtype = models::scalar_type(chunks_[chunk]->options().dtype);
    const auto add = [&](bool expert, at::ScalarType of) {
      std::vector<LeafSize> mine;
      for (std::size_t leaf = leaves.size(); leaf-- > 0;) {
        const auto& spec = spec_of(parameters, leaf);
        const auto& value = leaves[leaf].value;
        if (value.requires_grad() && spec.expert == expert && value.scalar_type() == of)
          mine.push_back({.leaf = leaf, .size = value.numel(), .alone = is_embedding(spec)});
      }
      if (mine.empty()) return;
      const auto& group = expert ? mesh().edp() : mesh().dp_cp();
      buffers_.emplace_back(parameters, layout_buckets(mine, group.size(), config_.bucket_size),
                            group, config_.grad_reduce_in_fp32 ? at::kFloat : of);
      chunk_of_.push_back(chunk);
    };
    add(/*expert=*/false, dtype);
    add(/*expert=*/true, dtype);
    if (dtype != at::kFloat) add(/*expert=*/false, at::kFloat);  // weights less one
  }
  progress_.resize(buffers_.size());
  for (std::size_t buffer = 0; buffer < buffers_.size(); ++buffer) {
    auto& buckets = buffers_[buffer].buckets();
    for (std::size_t bucket = 0; bucket < buckets.size(); ++bucket) {
      for (const auto& slot : buckets[bucket].slots()) {
        const auto& leaf = buffers_[buffer].parameters().leaves()[slot.leaf].value;
        torch::autograd::impl::set_post_acc_grad_hooks(
            leaf, std::make_unique<Hook>(*this, buffer, bucket, slot));
      }
    }
  }
}

DistributedDataParallel::~DistributedDataParallel() {
  for (const auto& buffer : buffers_) {
    for (const auto& bucket : buffer.buckets()) {
      for (const auto& slot : bucket.slots())
        torch::autograd::impl::set_post_acc_grad_hooks(
            buffer.parameters().leaves()[slot.leaf].value, nullptr);
    }
  }
}

const ParameterSpec& DistributedDataParallel::spec(std::size_t buffer,
                                                   const BufferSlot& slot) const {
  return spec_of(buffers_[buffer].parameters(), slot.leaf);
}

void DistributedDataParallel::zero_grad() {
  for (auto& buffer : buffers_) {
    require(buffer.grads().storage().nbytes() > 0, ErrorKind::kBug,
            "gradients are wanted while they have no memory");
    buffer.grads().zero_();
  }
}

void DistributedDataParallel::expect_last_backward(std::size_t chunk) {
  if (!config_.overlap_grad_reduce) return;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    if (chunk_of_[i] != chunk) continue;
    progress_[i] = {.last_backward = true};
    for (const auto& bucket : buffers_[i].buckets())
      progress_[i].missing.push_back(bucket.slots().size());
  }
}

void DistributedDataParallel::accumulated(std::size_t buffer, std::size_t bucket) {
  auto& progress = progress_[buffer];
  if (!progress.last_backward) return;
  --progress.missing[bucket];
  // The embedding may get gradients in two places, and a vision tower, whose leaves come behind it,
  // from each prompt of a micro-batch: they wait for the end.
  auto& buckets = buffers_[buffer].buckets();
  while (progress.next < buckets.size() && progress.missing[progress.next] == 0 &&
         !is_embedding(spec(buffer, buckets[progress.next].slots().front()))) {
    buckets[progress.next++].start_grad_sync();
  }
}

void DistributedDataParallel::finish_grad_sync() {
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    auto& buckets = buffers_[i].buckets();
    for (auto next = progress_[i].next; next < buckets.size(); ++next)
      buckets[next].start_grad_sync();
    progress_[i] = {};
  }
  for (auto& buffer : buffers_) {
    for (auto& bucket : buffer.buckets()) bucket.finish_grad_sync();
  }
  sum_over_tensor_parallel_ranks();
  sum_embeddings();
}

// Sums the shards of parameters that tensor parallel ranks hold whole, in one collective:
// their buffers are laid out alike.
void DistributedDataParallel::sum_over_tensor_parallel_ranks() {
  if (mesh().tp().size() == 1) return;
  std::vector<at::Tensor> pieces;
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    for (const auto& bucket : buffers_[i].buckets()) {
      for (const auto& slot : bucket.slots()) {
        const auto& leaf = buffers_[i].parameters().leaves()[slot.leaf];
        const bool partial = leaf.gradient == models::GradientOverTp::kPartial &&
                             spec(i, slot).sharing == models::Sharing::kReplicated;
        const auto mine = intersect(slot, bucket.shard_begin(), bucket.shard_end());
        if (partial && mine.size > 0)
          pieces.push_back(buffers_[i].grads().narrow(0, mine.begin, mine.size));
      }
    }
  }
  if (pieces.empty()) return;
  const auto sum = mesh().tp().all_reduce(at::cat(pieces));
  std::int64_t at = 0;
  for (auto& piece : pieces) {
    piece.copy_(sum.narrow(0, at, piece.size(0)));
    at += piece.size(0);
  }
}

// Copies of the embedding have the same shards on all stages, since each has a bucket of its own.
void DistributedDataParallel::sum_embeddings() {
  std::vector<at::Tensor> copies;  // of this stage, in the order of its chunks
  for (std::size_t i = 0; i < buffers_.size(); ++i) {
    for (const auto& bucket : buffers_[i].buckets()) {
      if (is_embedding(spec(i, bucket.slots().front()))) copies.push_back(bucket.grad_shard());
    }
  }
  if (copies.empty()) return;
  for (std::size_t i = 1; i < copies.size(); ++i) copies[0].add_(copies[i]);
  const auto stages = chunks_.front()->embedding_stages();
  if (stages.size() > 1) models::sum_over_stages(mesh().pp(), copies[0], stages);
  for (std::size_t i = 1; i < copies.size(); ++i) copies[i].copy_(copies[0]);
}

void DistributedDataParallel::sync_params() {
  for (auto& buffer : buffers_) {
    for (auto& bucket : buffer.buckets()) bucket.start_param_sync();
  }
  for (auto& buffer : buffers_) {
    for (auto& bucket : buffer.buckets()) bucket.finish_param_sync();
  }
}

bool DistributedDataParallel::is_counted_here(std::size_t buffer, const BufferSlot& slot) const {
  const auto& of = spec(buffer, slot);
  if (of.replica_id[0] != 0) return false;  // a second copy of the embedding
  const auto& at = mesh().coordinates();
  return of.sharing == models::Sharing::kSharded || (of.expert ? at.etp : at.tp) == 0;
}

}  // namespace ferry::trainer
