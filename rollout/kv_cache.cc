#include "rollout/kv_cache.h"

#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_put.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/zeros.h>

#include "distckpt/base/error.h"
#include "models/device/memory_error.h"
#include "models/distributed/world.h"
#include "models/kernels/attention/paged_attention.h"
#include "models/spec/costs.h"

namespace ferry::rollout {

using models::GPTModel;

namespace {

models::KeyValueShape shape_of(const GPTModel& model) {
  return models::key_value_shape(model.config(), model.mesh().shape().tp(),
                                 model.options().alignment);
}

// Copies the rows slots[0] of x to its rows slots[1].
void copy_rows(const at::Tensor& x, const at::Tensor& slots) {
  x.index_copy_(0, slots[1], x.index_select(0, slots[0]));
}

// Chunks of the delta rule begin where blocks begin: states behind blocks are those of chunks.
static_assert(KVCache::kBlockSize % models::kDeltaChunk == 0);

}  // namespace

std::int64_t KVCache::bytes_per_block(const GPTModel& model) {
  const auto& config = model.config();
  const auto of_token =
      models::key_value_bytes(config, model.mesh().shape().tp(), model.options().layout());
  return kBlockSize * of_token / config.num_key_value_layers() *
         kv_cache_groups(config).layers_per_block;
}

std::int64_t KVCache::bytes_per_slot(const GPTModel& model) {
  return models::linear_state_bytes(model.config(), model.mesh().shape().tp(),
                                    model.options().layout(),
                                    model.mesh().world().device().is_cpu());
}

KVCache::KVCache(const GPTModel& model, std::int64_t num_blocks, std::int64_t num_slots)
    : model_(model),
      groups_(kv_cache_groups(model.config())),
      num_blocks_(num_blocks),
      num_slots_(num_slots) {
  allocate();
}

void KVCache::release() {
  keys_.clear();
  values_.clear();
  states_.clear();
}

void KVCache::allocate() {
  const auto& config = model_.config();
  const auto shape = shape_of(model_);
  const auto linear =
      models::linear_state_shape(config, model_.mesh().shape().tp(), model_.options().alignment,
                                 model_.mesh().world().device().is_cpu());
  const auto options = at::TensorOptions()
                           .dtype(models::scalar_type(model_.options().dtype))
                           .device(model_.mesh().world().device());
  const auto make_states = [&] {
    const auto slots = [&](std::vector<std::int64_t> sizes, const at::TensorOptions& of) {
      sizes.insert(sizes.begin(), num_slots_ + 1);
      return at::zeros(sizes, of);
    };
    const auto in_fp32 = options.dtype(at::kFloat);
    return models::LinearStates{
        .conv = slots({linear.kernel - 1, linear.channels}, options),
        .recurrent = slots({linear.heads, linear.key_dim, linear.value_dim}, in_fp32),
        .mixed = slots({linear.rows, linear.channels}, options),
        .decay = slots({linear.rows, linear.heads}, in_fp32),
        .beta = slots({linear.rows, linear.heads}, options)};
  };
  // Slot -1 is in the last block.
  const auto blocks = num_blocks_ + (groups_.has_windows() ? 2 : 1);
  try {
    for (std::int64_t layer = 0; layer < config.num_layers; ++layer) {
      const bool is_linear = config.is_linear_attention_layer(layer);
      const auto make = [&](std::int64_t channels) {
        return at::zeros({is_linear ? 0 : blocks, kBlockSize, shape.groups, channels}, options);
      };
      if (place_of(layer).index == std::ssize(keys_)) {
        keys_.push_back(make(shape.dim));
        values_.push_back(make(shape.value_dim));
      }
      states_.push_back(is_linear ? make_states() : models::LinearStates{});
    }
  } catch (const c10::Error&) {
    release();
    throw models::OutOfMemory(
        ErrorKind::kDevice,
        fmt::format(
            "no memory for a KV cache of {} blocks, {} MiB", num_blocks_,
            (num_blocks_ * bytes_per_block(model_) + num_slots_ * bytes_per_slot(model_)) >> 20),
        "a smaller share of the GPU's memory, or fewer blocks");
  }
}

std::vector<std::pair<at::Tensor, at::Tensor>> KVCache::layers() const {
  std::vector<std::pair<at::Tensor, at::Tensor>> both;
  if (keys_.empty()) return both;  // released
  for (std::int64_t layer = 0; layer < std::ssize(groups_.places); ++layer)
    both.emplace_back(key(layer), value(layer));
  return both;
}

// index_put_ counts slot -1 from the end: it is in the additional block, which nobody reads.
void KVCache::store(std::int64_t layer,
                    const at::Tensor& slots,
                    const at::Tensor& key,
                    const at::Tensor& value) {
  const auto is_in_units = [](const at::Tensor& x) {
    return x.size(2) * x.element_size() % 16 == 0;
  };
  if (key.is_cuda() && is_in_units(key) && (!value.defined() || is_in_units(value))) {
    models::store_in_slots_cuda(key, value, slots, this->key(layer), this->value(layer));
    return;
  }
  this->key(layer).flatten(0, 1).index_put_({slots}, key);
  if (value.defined()) this->value(layer).flatten(0, 1).index_put_({slots}, value);
}

void KVCache::copy(std::int64_t layer, const at::Tensor& slots) {
  for (const auto& blocks : {key(layer), value(layer)}) {
    if (blocks.numel() == 0) continue;  // latents have no values
    copy_rows(blocks.flatten(0, 1), slots);
  }
}

void KVCache::copy_states(const at::Tensor& slots) {
  if (slots.size(1) == 0) return;
  for (const auto& of_layer : states_) {
    for (const auto& state :
         {of_layer.conv, of_layer.recurrent, of_layer.mixed, of_layer.decay, of_layer.beta}) {
      if (state.defined() && state.numel() > 0) copy_rows(state, slots);
    }
  }
}

}  // namespace ferry::rollout
