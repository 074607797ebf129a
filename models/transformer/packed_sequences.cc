#include "models/transformer/packed_sequences.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "models/distributed/world.h"

namespace ferry::models {
namespace {

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

// The pieces of the pack that a context parallel rank has.
std::vector<Range> pieces_of(int rank, int ranks, std::int64_t padded) {
  if (ranks == 1) return {{0, padded}};
  const auto size = padded / 2 / ranks;
  const auto piece = [&](std::int64_t i) { return Range{i * size, (i + 1) * size}; };
  return {piece(rank), piece(2 * ranks - 1 - rank)};
}

// The mask of the given tokens of the pack; tokens of the padding have none.
SamplingMask select_rows(const SamplingMask& mask, const at::Tensor& tokens) {
  const auto ids = mask.token_ids.contiguous();
  const auto* const id = ids.const_data_ptr<std::int64_t>();
  const auto rows = tokens.contiguous();
  std::vector<std::int64_t> chosen;
  SamplingMask some{.offsets = {0}};
  for (std::int64_t i = 0; i < rows.numel(); ++i) {
    const auto row = static_cast<std::size_t>(rows.const_data_ptr<std::int64_t>()[i]);
    if (row + 1 < mask.offsets.size())
      chosen.insert(chosen.end(), id + mask.offsets[row], id + mask.offsets[row + 1]);
    some.offsets.push_back(static_cast<std::int64_t>(chosen.size()));
  }
  some.token_ids = at::tensor(chosen, at::kLong);
  return some;
}

}  // namespace

PackedSequences pack(const std::vector<at::Tensor>& sequences) {
  PackedSequences packed{.tokens = at::cat(sequences), .cu_seqlens = {0}};
  for (const auto& sequence : sequences)
    packed.cu_seqlens.push_back(packed.cu_seqlens.back() + sequence.size(0));
  return packed;
}

SequencePartition::SequencePartition(const PackedSequences& pack, const ParallelState& mesh)
    : num_tokens_(pack.tokens.size(0)), cu_seqlens_(pack.cu_seqlens) {
  auto ends = pack.cu_seqlens;
  require(ends.size() > 1 && ends.front() == 0 && ends.back() == num_tokens_ &&
              std::ranges::adjacent_find(ends, std::greater_equal()) == ends.end(),
          ErrorKind::kUsage, "cu_seqlens has to ascend from 0 to the {} tokens", num_tokens_);
  const int cp = mesh.shape().cp();
  const auto unit = static_cast<std::int64_t>(mesh.shape().tp()) * (cp == 1 ? 1 : 2 * cp);
  const auto padded = distckpt::round_up(num_tokens_, unit);
  if (padded > num_tokens_) ends.push_back(padded);
  for (std::size_t i = 0; i + 1 < ends.size(); ++i)
    padded_lengths_.push_back(ends[i + 1] - ends[i]);

  const auto host = at::TensorOptions().dtype(at::kLong);
  auto positions = at::empty({padded}, host);
  auto* const position = positions.mutable_data_ptr<std::int64_t>();
  for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
    for (auto at = ends[i]; at < ends[i + 1]; ++at) position[at] = at - ends[i];
  }
  std::vector<at::Tensor> rows;
  std::int64_t local = 0;
  for (const auto& piece : pieces_of(mesh.coordinates().cp, cp, padded)) {
    const auto length = piece.end - piece.begin;
    rows.push_back(at::arange(piece.begin, piece.end, host));
    for (std::size_t i = 0; i + 1 < ends.size(); ++i) {
      const auto begin = std::max(piece.begin, ends[i]);
      const auto end = std::min(piece.end, ends[i + 1]);
      if (begin >= end) continue;
      segments_.push_back({.query_begin = local + begin - piece.begin,
                           .num_queries = end - begin,
                           .key_begin = ends[i],
                           .num_keys = end - ends[i]});
    }
    local += length;
  }
  const auto device = mesh.world().device();
  const auto all_rows = at::cat(rows);
  rows_ = all_rows.to(device);
  if (pack.scored.defined()) {
    const auto whole = at::constant_pad_nd(pack.scored, {0, padded - num_tokens_});
    const auto scored = at::nonzero(whole.index_select(0, all_rows)).squeeze(1);
    scored_ = scored.to(device);
    if (pack.sampling_mask.defined()) {
      sampling_mask_ = select_rows(pack.sampling_mask, all_rows.index_select(0, scored));
      sampling_mask_.token_ids = sampling_mask_.token_ids.to(device);
    }
  }
  padded_ = at::constant_pad_nd(pack.tokens, {0, padded - num_tokens_}).to(device);
  tokens_ = padded_.index_select(0, rows_);
  if (pack.positions.defined()) {
    require(pack.positions.dim() == 2 && pack.positions.size(1) == num_tokens_, ErrorKind::kBug,
            "positions of {} tokens for a pack of {}", pack.positions.size(-1), num_tokens_);
    positions = at::constant_pad_nd(pack.positions, {0, padded - num_tokens_});
  }
  positions_ = positions.to(device).index_select(-1, rows_);
  if (cp == 1) return;

  std::vector<at::Tensor> of_ranks;  // where each of the gathered tokens lies in the pack
  for (int rank = 0; rank < cp; ++rank) {
    for (const auto& piece : pieces_of(rank, cp, padded))
      of_ranks.push_back(at::arange(piece.begin, piece.end, host));
  }
  const auto order = at::cat(of_ranks);
  rank_order_ = order.to(device);
  pack_order_ = order.argsort().to(device);
}

at::Tensor SequencePartition::local(const at::Tensor& of_pack) const {
  require(of_pack.size(0) == num_tokens_, ErrorKind::kBug, "{} rows for a pack of {} tokens",
          of_pack.size(0), num_tokens_);
  auto padding = of_pack.sizes().vec();
  padding[0] = padded_.size(0) - num_tokens_;
  const auto whole =
      padding[0] == 0 ? of_pack : at::cat({of_pack, at::zeros(padding, of_pack.options())});
  return whole.to(rows_.device()).index_select(0, rows_);
}

VisualRows SequencePartition::local(const VisualRows& of_pack) const {
  if (!of_pack.any()) return {};
  const auto device = rows_.device();
  auto image_row = at::full({padded_.size(0)}, -1, at::TensorOptions(at::kLong).device(device));
  image_row.index_copy_(0, of_pack.rows.to(device),
                        at::arange(of_pack.rows.size(0), image_row.options()));
  const auto mine = image_row.index_select(0, rows_);
  const auto rows = at::nonzero(mine.ge(0)).squeeze(1);
  return of_pack.select(rows, mine.index_select(0, rows));
}

at::Tensor SequencePartition::sequence_ids() const {
  const auto ends = at::tensor(at::ArrayRef(cu_seqlens_).slice(1), at::kLong);
  return at::searchsorted(ends.to(rows_.device()), rows_, /*out_int32=*/false, /*right=*/true);
}

at::Tensor SequencePartition::sequence_lengths() const {
  return at::tensor(padded_lengths_, at::kLong).to(rows_.device()).index_select(0, sequence_ids());
}

at::Tensor SequencePartition::tokens_behind(std::int64_t distance) const {
  return at::roll(padded_, -distance, 0).index_select(0, rows_);
}

at::Tensor SequencePartition::in_pack_order(const at::Tensor& gathered) const {
  return pack_order_.defined() ? gathered.index_select(0, pack_order_) : gathered;
}

at::Tensor SequencePartition::in_rank_order(const at::Tensor& of_pack) const {
  return rank_order_.defined() ? of_pack.index_select(0, rank_order_) : of_pack;
}

}  // namespace ferry::models
