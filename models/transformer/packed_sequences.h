// A batch: sequences one after another, without padding (THD), and the part of it that a rank works
// on.
//
// Context parallelism cuts the pack into twice as many pieces as ranks and gives each rank one from
// the front and one from the back, so that causal attention is shared out evenly; with sequence
// parallelism tensor parallel ranks share these tokens in equal parts. A padding sequence, which is
// never read, fills the end of the pack up to equal pieces.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "models/distributed/parallel_state.h"
#include "models/kernels/attention/attention.h"
#include "models/kernels/log_probs.h"
#include "models/transformer/visual_rows.h"

namespace ferry::models {

struct PackedSequences {
  at::Tensor tokens{};                     // [tokens], int64
  std::vector<std::int64_t> cu_seqlens{};  // sequence i is [cu_seqlens[i], cu_seqlens[i + 1])
  at::Tensor scored{};                     // [tokens], bool: those that get results; undefined: all
  SamplingMask sampling_mask{};            // of each token, on the host; needs `scored`
  // [3, tokens], int64, on the host: in time, height and width; undefined: the place in the
  // sequence
  at::Tensor positions{};
};

// One sequence after another.
PackedSequences pack(const std::vector<at::Tensor>& sequences);

class SequencePartition {
 public:
  // Throws Error(kUsage) if cu_seqlens is not that of the tokens.
  SequencePartition(const PackedSequences& pack, const ParallelState& mesh);

  std::int64_t num_tokens() const { return num_tokens_; }  // of the pack as it was given
  const std::vector<std::int64_t>& cu_seqlens() const { return cu_seqlens_; }  // the same
  // The tokens of this rank's context parallel part, the same on all its tensor parallel ranks.
  const at::Tensor& tokens() const { return tokens_; }  // [local]
  // [local], each in its sequence, or [3, local] in time, height and width.
  const at::Tensor& positions() const { return positions_; }
  // The sequence of each, from 0; the number of sequences for the padding: [local].
  at::Tensor sequence_ids() const;
  at::Tensor sequence_lengths() const;  // the tokens of each one's sequence: [local]
  // The tokens `distance` places after these in the pack, which wraps around at its end: [local].
  at::Tensor tokens_behind(std::int64_t distance) const;
  // The indices of the scored ones among these: [scored], int64, ascending; undefined: all.
  const at::Tensor& scored() const { return scored_; }
  // The mask of the scored tokens, on the device.
  const SamplingMask& sampling_mask() const { return sampling_mask_; }
  const std::vector<AttentionSegment>& segments() const { return segments_; }
  // The tokens of each sequence of the whole pack, and of the padding, if there is some.
  const std::vector<std::int64_t>& padded_lengths() const { return padded_lengths_; }

  // [tokens, ...] of the pack -> [local, ...] of this rank, on its device; padding gives zeros.
  at::Tensor local(const at::Tensor& of_pack) const;
  // Rows of images among the pack's tokens -> those among this rank's, on its device.
  VisualRows local(const VisualRows& of_pack) const;
  // [local of every context parallel rank, in their order, ...] -> [padded, ...], in the order of
  // the pack.
  at::Tensor in_pack_order(const at::Tensor& gathered) const;
  // The way back: [padded, ...] -> [local of every context parallel rank, ...].
  at::Tensor in_rank_order(const at::Tensor& of_pack) const;

 private:
  std::int64_t num_tokens_ = 0;
  std::vector<std::int64_t> cu_seqlens_;
  at::Tensor padded_;  // the tokens of the pack, filled up
  at::Tensor rows_;    // [local]: where in it this rank's lie
  at::Tensor tokens_, positions_, scored_;
  at::Tensor pack_order_, rank_order_;  // [padded]; undefined: they are the same
  SamplingMask sampling_mask_;
  std::vector<AttentionSegment> segments_;
  std::vector<std::int64_t> padded_lengths_;
};

}  // namespace ferry::models
