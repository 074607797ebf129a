#include "trainer/optimizer/streamed_adam.h"

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>

namespace ferry::trainer {
namespace {

AdamTensors part_of(const AdamTensors& shard, std::int64_t begin, std::int64_t size) {
  const auto cut = [&](const at::Tensor& x) {
    return x.defined() ? x.narrow(0, begin, size) : at::Tensor();
  };
  return {.grad = cut(shard.grad),
          .master = cut(shard.master),
          .exp_avg = cut(shard.exp_avg),
          .exp_avg_sq = cut(shard.exp_avg_sq),
          .param = cut(shard.param),
          .decays = shard.decays.narrow(0, begin / 64, size / 64)};
}

constexpr std::array kState{&AdamTensors::master, &AdamTensors::exp_avg, &AdamTensors::exp_avg_sq};

// Memory for a piece of the state, and the ends of what was last done with it. Events that were
// never recorded hold nobody back.
struct Slot {
  explicit Slot(c10::DeviceType type) : is_up(type), is_updated(type), is_down(type) {}

  AdamTensors memory{};  // of the state alone
  c10::Event is_up, is_updated, is_down;
};

// Streams and slots of one update.
class Staging {
 public:
  Staging(const std::vector<AdamTensors>& shards, std::int64_t slot_elements)
      : device_(shards.front().grad.device()),
        here_(device_.type()),
        compute_(here_.getStream(device_)),
        up_(here_.getStreamFromGlobalPool(device_)),
        down_(here_.getStreamFromGlobalPool(device_)) {
    for (int i = 0; i < kNumStagingSlots; ++i) {
      auto& slot = slots_.emplace_back(device_.type());
      for (const auto part : kState) slot.memory.*part = memory_for(shards, part, slot_elements);
    }
    // The current stream may still work with that memory.
    c10::Event allocated(device_.type());
    allocated.record(compute_);
    allocated.block(up_);
  }

  void update(const AdamTensors& piece, const AdamScalars& scalars) {
    auto& slot = slots_[next_++ % slots_.size()];
    slot.is_down.block(up_);
    const auto staged = copy_up(piece, slot);
    slot.is_up.record(up_);
    slot.is_up.block(compute_);
    adam_update(staged, scalars);
    slot.is_updated.record(compute_);
    slot.is_updated.block(down_);
    copy_down(staged, piece);
    slot.is_down.record(down_);
  }
  void finish() {
    for (const auto& slot : slots_) slot.is_down.synchronize();
  }

 private:
  // Memory for the longest piece that does not lie on the device.
  at::Tensor memory_for(const std::vector<AdamTensors>& shards,
                        at::Tensor AdamTensors::*part,
                        std::int64_t slot_elements) const {
    std::int64_t longest = 0;
    for (const auto& shard : shards) {
      if ((shard.*part).device() != device_) longest = std::max(longest, (shard.*part).numel());
    }
    return at::empty({std::min(longest, slot_elements)},
                     at::TensorOptions((shards.front().*part).scalar_type()).device(device_));
  }
  AdamTensors copy_up(const AdamTensors& piece, const Slot& slot) const {
    const c10::StreamGuard guard(up_);
    auto staged = piece;
    for (const auto part : kState) {
      const auto& state = piece.*part;
      if (state.device() == device_) continue;
      staged.*part = (slot.memory.*part).narrow(0, 0, state.numel());
      (staged.*part).copy_(state, /*non_blocking=*/true);
    }
    return staged;
  }
  void copy_down(const AdamTensors& staged, const AdamTensors& piece) const {
    const c10::StreamGuard guard(down_);
    for (const auto part : kState) {
      if ((piece.*part).device() != device_)
        (piece.*part).copy_(staged.*part, /*non_blocking=*/true);
    }
  }

  c10::Device device_;
  c10::impl::VirtualGuardImpl here_;
  c10::Stream compute_, up_, down_;
  std::vector<Slot> slots_;
  std::size_t next_ = 0;
};

}  // namespace

void for_stretches(std::int64_t elements,
                   std::int64_t at_once,
                   const std::function<void(std::int64_t begin, std::int64_t size)>& body) {
  for (std::int64_t begin = 0; begin < elements; begin += at_once)
    body(begin, std::min(at_once, elements - begin));
}

void streamed_adam_update(const std::vector<AdamTensors>& shards,
                          const AdamScalars& scalars,
                          std::int64_t slot_elements) {
  if (shards.empty()) return;
  const auto each_piece = [&](const auto& update) {
    for (const auto& shard : shards) {
      for_stretches(shard.grad.numel(), slot_elements, [&](std::int64_t begin, std::int64_t size) {
        update(part_of(shard, begin, size));
      });
    }
  };
  if (shards.front().grad.is_cpu())
    return each_piece([&](const AdamTensors& piece) { adam_update(piece, scalars); });
  Staging staging(shards, slot_elements);
  each_piece([&](const AdamTensors& piece) { staging.update(piece, scalars); });
  staging.finish();
}

}  // namespace ferry::trainer
