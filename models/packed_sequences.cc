#include "models/packed_sequences.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "distckpt/error.h"
#include "models/world.h"

namespace ferry::models {

PackedSequences pack(const std::vector<at::Tensor>& sequences) {
  PackedSequences packed{.tokens = at::cat(sequences), .cu_seqlens = {0}};
  for (const auto& sequence : sequences)
    packed.cu_seqlens.push_back(packed.cu_seqlens.back() + sequence.size(0));
  return packed;
}

SequencePartition::SequencePartition(const PackedSequences& pack, const ParallelState& mesh)
    : num_tokens_(pack.tokens.size(0)),
      cp_(mesh.shape().cp()),
      cp_rank_(mesh.coordinates().cp),
      device_(mesh.world().device()) {
  auto ends = pack.cu_seqlens;
  require(ends.size() > 1 && ends.front() == 0 && ends.back() == num_tokens_ &&
              std::ranges::adjacent_find(ends, std::greater_equal()) == ends.end(),
          ErrorKind::kUsage, "cu_seqlens has to ascend from 0 to the {} tokens", num_tokens_);
  const auto unit = static_cast<std::int64_t>(mesh.shape().tp()) * (cp_ == 1 ? 1 : 2 * cp_);
  padded_ = (num_tokens_ + unit - 1) / unit * unit;
  if (padded_ > num_tokens_) ends.push_back(padded_);

  const auto host = at::TensorOptions().dtype(at::kLong);
  auto positions = at::empty({padded_}, host);
  auto* const position = positions.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    for (auto at = ends[i]; at < ends[i + 1]; ++at) position[at] = at - ends[i];
  }
  std::int64_t local_rows = 0;
  for (const auto& piece : pieces_of(cp_rank_)) {
    for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
      const auto begin = std::max(piece.begin, ends[i]);
      const auto end = std::min(piece.end, ends[i + 1]);
      if (begin >= end) continue;
      segments_.push_back({.query_begin = local_rows + begin - piece.begin,
                           .num_queries = end - begin,
                           .key_begin = ends[i],
                           .num_keys = end - ends[i]});
    }
    local_rows += piece.end - piece.begin;
  }
  tokens_ = local(pack.tokens);
  positions_ = local(positions);
  if (cp_ == 1) return;

  auto order = at::empty({padded_}, host);  // where each token of the pack lies in the gathered ones
  std::int64_t at = 0;
  for (int rank = 0; rank < cp_; ++rank) {
    for (const auto& piece : pieces_of(rank)) {
      order.narrow(0, piece.begin, piece.end - piece.begin)
          .copy_(at::arange(at, at + piece.end - piece.begin, host));
      at += piece.end - piece.begin;
    }
  }
  order_ = order.to(device_);
}

std::vector<SequencePartition::Piece> SequencePartition::pieces_of(int rank) const {
  if (cp_ == 1) return {{0, padded_}};
  const auto size = padded_ / (2 * cp_);
  const auto piece = [&](std::int64_t i) { return Piece{i * size, (i + 1) * size}; };
  return {piece(rank), piece(2 * cp_ - 1 - rank)};
}

at::Tensor SequencePartition::local(const at::Tensor& of_pack) const {
  require(of_pack.size(0) == num_tokens_ || of_pack.size(0) == padded_, ErrorKind::kBug,
          "{} rows for a pack of {} tokens", of_pack.size(0), num_tokens_);
  std::vector<at::Tensor> parts;
  for (const auto& piece : pieces_of(cp_rank_)) {
    const auto end = std::min(piece.end, of_pack.size(0));
    const auto begin = std::min(piece.begin, end);
    parts.push_back(of_pack.narrow(0, begin, end - begin));
    if (end - begin < piece.end - piece.begin) {
      auto shape = of_pack.sizes().vec();
      shape[0] = piece.end - piece.begin - (end - begin);
      parts.push_back(at::zeros(shape, of_pack.options()));
    }
  }
  return at::cat(parts).to(device_);
}

at::Tensor SequencePartition::in_pack_order(const at::Tensor& gathered) const {
  return order_.defined() ? gathered.index_select(0, order_) : gathered;
}

}  // namespace ferry::models
