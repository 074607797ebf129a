#include "converter/delta/seen_blocks.h"

#include <algorithm>

#include "distckpt/base/integers.h"

namespace ferry::converter {

using distckpt::Digest;
using distckpt::kDigestBlock;

SeenBlocks::SeenBlocks(const std::vector<distckpt::ModelTensor>& tensors) {
  for (const auto& tensor : tensors) {
    const auto count =
        static_cast<std::size_t>(distckpt::ceil_div(tensor.num_bytes(), kDigestBlock));
    tensors_.push_back({.dtype = tensor.dtype,
                        .shape = tensor.shape,
                        .digests = std::vector<Digest>(count),
                        .missing = count});
  }
}

std::optional<Digest> SeenBlocks::add(std::uint32_t tensor,
                                      std::int64_t offset,
                                      std::span<const std::byte> bytes) {
  std::vector<Digest> found;
  for (std::size_t at = 0; at < bytes.size(); at += kDigestBlock)
    found.push_back(distckpt::digest_block(
        bytes.subspan(at, std::min<std::size_t>(kDigestBlock, bytes.size() - at))));
  const std::lock_guard lock(*mutex_);
  auto& blocks = tensors_[tensor];
  std::ranges::copy(found, blocks.digests.begin() + offset / kDigestBlock);
  blocks.missing -= found.size();
  if (blocks.missing > 0) return std::nullopt;
  return digest_tensor(blocks.dtype, blocks.shape, blocks.digests);
}

}  // namespace ferry::converter
