#include "models/reshard/message_delta.h"

#include <ATen/ATen.h>

#include <cstdint>

#include "distckpt/base/integers.h"

namespace ferry::models {
namespace {

constexpr std::int64_t kDeltaBlock = 256;

struct Sections {
  at::Tensor counts{};   // [blocks] int16
  at::Tensor indices{};  // [changes] bytes
  at::Tensor values{};   // [changes] int16
};
Sections sections_of(const at::Tensor& encoded, std::int64_t blocks, std::int64_t changes) {
  const auto indices = 2 * blocks;
  const auto values = indices + changes + changes % 2;
  return {.counts = encoded.narrow(0, 0, indices).view(at::kShort),
          .indices = encoded.narrow(0, indices, changes),
          .values = encoded.narrow(0, values, 2 * changes).view(at::kShort)};
}

std::int64_t blocks_of(const at::Tensor& words) {
  return distckpt::ceil_div(words.numel(), kDeltaBlock);
}

}  // namespace

at::Tensor encode_changes(const at::Tensor& now, const at::Tensor& before) {
  const auto words = now.view(at::kShort);
  const auto changed = words.ne(before.view(at::kShort));
  const auto changes = changed.sum().item<std::int64_t>();
  if (changes == 0) return at::empty({0}, now.options());
  const auto blocks = blocks_of(words);
  const auto bytes = 2 * blocks + changes + changes % 2 + 2 * changes;
  if (bytes >= now.numel()) return {};
  const auto places = changed.nonzero().view({-1});
  auto encoded = at::zeros({bytes}, now.options());
  const auto [counts, indices, values] = sections_of(encoded, blocks, changes);
  counts.copy_(at::bincount(places.div(kDeltaBlock, "floor"), {}, blocks));
  indices.copy_(places.remainder(kDeltaBlock));
  values.copy_(words.index_select(0, places));
  return encoded;
}

void apply_changes(const at::Tensor& changes, at::Tensor& before) {
  if (changes.numel() == 0) return;
  auto words = before.view(at::kShort);
  const auto blocks = blocks_of(words);
  const auto count =
      (changes.numel() - 2 * blocks) / 3;  // with the one to an even number or without
  const auto [counts, indices, values] = sections_of(changes, blocks, count);
  const auto first = at::arange(blocks, counts.options().dtype(at::kLong)) * kDeltaBlock;
  const auto places = at::repeat_interleave(first, counts.to(at::kLong), 0, count) + indices;
  words.index_copy_(0, places, values);
}

}  // namespace ferry::models
