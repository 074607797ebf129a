// The gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464): linear
// attention whose state decays, and which replaces what the state holds of a key by the key's new
// value. Order of operations and roundings are those of transformers 5.17,
// models/qwen3_next/modeling_qwen3_next.py: torch_chunk_gated_delta_rule for whole sequences,
// torch_recurrent_gated_delta_rule for single tokens.
//
// Chunks of kDeltaChunk tokens have the same shapes in every sequence, and a token's result depends
// on the tokens before it alone: a sequence that is cut at any chunk's end, and goes on from the
// state there, has the same bits in kBitwise.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "models/spec/alignment.h"

namespace ferry::models {

// Tokens of sequences of one length. Value heads are a multiple of key heads.
struct DeltaRows {
  at::Tensor query{};  // [sequences, tokens, key heads, key_dim]
  at::Tensor key{};    // the same
  at::Tensor value{};  // [sequences, tokens, value heads, value_dim]
  at::Tensor decay{};  // [sequences, tokens, value heads], fp32: the logarithm, at most 0
  at::Tensor beta{};   // [sequences, tokens, value heads]: how much of the old value is replaced
};

struct DeltaResult {
  at::Tensor output{};  // like DeltaRows::value
  at::Tensor state{};   // [sequences, value heads, key_dim, value_dim], fp32: behind the last token
  at::Tensor state_of_chunks{};  // the same behind the last whole chunk
};

// The parts of the rule that chunks have without one another, in fp32, for tokens in whole chunks.
struct DeltaInChunks {
  at::Tensor query{};         // [sequences, heads, chunks, kDeltaChunk, key_dim]
  at::Tensor key{};           // the same: what the chunk adds to the state
  at::Tensor reading_keys{};  // the same: what the new values take from the state
  at::Tensor new_values{};    // [sequences, heads, chunks, kDeltaChunk, value_dim]
  at::Tensor within{};        // [sequences, heads, chunks, kDeltaChunk, kDeltaChunk]
  at::Tensor of_chunk{};      // [sequences, heads, chunks]: the state's decay
};
DeltaInChunks delta_in_chunks(const DeltaRows& rows, Alignment alignment);

// `state`: that before the first token; undefined: zeros. Differentiable.
DeltaResult chunk_gated_delta_rule(const DeltaRows& rows,
                                   const at::Tensor& state,
                                   Alignment alignment);

// The same, token by token, with other roundings.
DeltaResult recurrent_gated_delta_rule(const DeltaRows& rows, const at::Tensor& state);

// Convolves each channel along the tokens, and takes silu of it. x [tokens, channels]; before
// [kernel - 1, channels]: the tokens before them, undefined: zeros; weight [channels, 1, kernel] ->
// like x. Differentiable.
at::Tensor causal_conv1d(const at::Tensor& x, const at::Tensor& before, const at::Tensor& weight);
// The same for one token of each sequence: x [sequences, channels], before [sequences, kernel - 1,
// channels].
at::Tensor causal_conv1d_update(const at::Tensor& x,
                                const at::Tensor& before,
                                const at::Tensor& weight);

// RMSNorm times silu(gate) (Qwen3NextRMSNormGated). x, gate [rows, channels], weight_less_one
// [channels], fp32 -> like x. Differentiable.
at::Tensor gated_rms_norm(const at::Tensor& x,
                          const at::Tensor& gate,
                          const at::Tensor& weight_less_one,
                          double epsilon);

}  // namespace ferry::models
