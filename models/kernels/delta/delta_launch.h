// Launches of the kernels of delta_cuda.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ferry::models::launch {

// Channels of a head that the kernels know, of keys and of values.
constexpr std::int64_t kDeltaDim = 128;
constexpr std::int64_t kMostTaps = 4;  // of a convolution

// Tokens of sequences: bf16 rows, states by slots. Rows of `mixed`, `gate`, `alpha` and `beta` lie
// one behind another.
struct DeltaTokens {
  const void* mixed = nullptr;          // [rows, channels]: before the convolution
  const void* conv_weight = nullptr;    // [channels, taps]
  void* convolved = nullptr;            // [rows, channels], to write
  const std::int64_t* rows = nullptr;   // [sequences]: the first row of each
  const std::int64_t* slots = nullptr;  // [sequences], or null where there are no states
  const void* alpha = nullptr;          // [rows, heads]
  const void* beta = nullptr;           // [rows, heads]: before sigmoid
  const float* a_log = nullptr;         // [heads]
  const float* dt_bias = nullptr;       // [heads]
  float* states = nullptr;              // [slots, heads, kDeltaDim, kDeltaDim], or null: zeros
  const void* gate = nullptr;           // [rows, heads, kDeltaDim]
  const float* norm = nullptr;          // [kDeltaDim]: the weight less one
  void* output = nullptr;               // [rows, heads, kDeltaDim]
  int sequences = 0;
  int key_heads = 0;
  int heads = 0;
  int taps = 0;
  float epsilon = 0;
};
// One token of each sequence; moves conv_states on, [slots, taps - 1, channels].
cudaError_t delta_step(const DeltaTokens& tokens, void* conv_states, cudaStream_t stream);

// Several tokens of each sequence, one after another; with the bits of so many steps.
struct DeltaWalk {
  DeltaTokens tokens{};
  const std::int64_t* counts = nullptr;  // [sequences]: the rows of each
  std::int64_t most = 0;                 // of them
  const void* before = nullptr;       // [sequences, taps - 1, channels]: what the convolution sees
                                      // before them, or null: zeros
  float* factors = nullptr;           // [rows, 2 key_heads], to write
  float* decays_and_betas = nullptr;  // [rows, heads, 2], to write
};
cudaError_t delta_walk(const DeltaWalk& walk, cudaStream_t stream);

// Chunks of 64 tokens of each sequence one after another, or backwards: Y = A + B S, then S = decay
// S + C^T Y + R. bf16 but for `decay`. S begins with zeros; sequence i has the chunks from
// begins[i] to begins[i + 1].
struct DeltaChunks {
  const void* a = nullptr;               // [heads, chunks, 64, values]
  const void* b = nullptr;               // [heads, chunks, 64, kDeltaDim]
  const void* c = nullptr;               // the same
  const float* decay = nullptr;          // [heads, chunks]
  const void* r = nullptr;               // [heads, chunks, kDeltaDim, values], or null
  const std::int32_t* begins = nullptr;  // [sequences + 1]
  void* y = nullptr;                     // like a
  void* states = nullptr;                // like r: S before each chunk
  int sequences = 0;
  int heads = 0;
  int chunks = 0;  // of all sequences
  int values = 0;  // a multiple of 32
  bool backwards = false;
};
cudaError_t delta_chunks(const DeltaChunks& chunks, cudaStream_t stream);

}  // namespace ferry::models::launch
