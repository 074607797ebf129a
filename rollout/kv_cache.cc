#include "rollout/kv_cache.h"

#include <ATen/ops/index_put.h>
#include <ATen/ops/zeros.h>

#include "models/kernels/paged_attention.h"
#include "models/transformer/attention.h"
#include "models/world.h"

namespace ferry::rollout {

using models::GPTModel;

namespace {

models::KeyValueShape shape_of(const GPTModel& model) {
  return models::key_value_shape(model.config(), model.mesh().shape().tp());
}

}  // namespace

std::int64_t KVCache::bytes_per_block(const GPTModel& model) {
  const auto shape = shape_of(model);
  return model.config().num_layers * kBlockSize * shape.groups * (shape.dim + shape.value_dim) *
         size_of(model.options().dtype);
}

KVCache::KVCache(const GPTModel& model, std::int64_t num_blocks) : num_blocks_(num_blocks) {
  const auto shape = shape_of(model);
  const auto options = at::TensorOptions()
                           .dtype(models::scalar_type(model.options().dtype))
                           .device(model.mesh().world().device());
  for (std::int64_t layer = 0; layer < model.config().num_layers; ++layer) {
    keys_.push_back(at::zeros({num_blocks + 1, kBlockSize, shape.groups, shape.dim}, options));
    values_.push_back(
        at::zeros({num_blocks + 1, kBlockSize, shape.groups, shape.value_dim}, options));
  }
}

// Where indices are put, slot -1 is the last one of all, in the block that belongs to nobody.
void KVCache::store(std::int64_t layer,
                    const at::Tensor& slots,
                    const at::Tensor& key,
                    const at::Tensor& value) {
  const auto is_in_units = [](const at::Tensor& x) {
    return x.size(2) * x.element_size() % 16 == 0;
  };
  if (key.is_cuda() && is_in_units(key) && is_in_units(value)) {
    models::store_in_slots_cuda(key, value, slots, this->key(layer), this->value(layer));
    return;
  }
  this->key(layer).flatten(0, 1).index_put_({slots}, key);
  this->value(layer).flatten(0, 1).index_put_({slots}, value);
}

}  // namespace ferry::rollout
