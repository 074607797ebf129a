// The arguments of the kernel in decode_row.cu, by raw pointers, so that nvcc never sees LibTorch's
// headers. All tensors are bf16, contiguous and aligned to 16 bytes; weights are [out, in].
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "models/peer/peer_exchange_launch.h"

namespace ferry::models::launch {

// A layer's products, in their order.
enum Product : int { kQkv, kProj, kFc1, kFc2, kProducts };

struct DecoderLayer {
  const void* weights[kProducts] =
      {};  // kQkv: of each group its queries, key and value; kFc1: gate above up
  const void* qkv_bias = nullptr;  // or null
  const void* attention_norm = nullptr;
  const void* mlp_norm = nullptr;
  const void* q_norm = nullptr;  // of each head; or null, like k_norm
  const void* k_norm = nullptr;
  void* key_cache = nullptr;  // [blocks, 64, groups, dim]
  void* value_cache = nullptr;
};

struct DecodeRowShape {
  int ranks = 1;  // tensor parallel
  int rank = 0;
  int layers = 0;
  int hidden = 0;
  int ffn = 0;  // of this rank, like heads and groups
  int heads = 0;
  int groups = 0;
  int dim = 0;         // of a head: 64 or 128
  int window = 0;      // keys that the row sees at most, its own among them; 0: all
  int max_blocks = 0;  // of block_table
  float epsilon = 0;
  float scale = 0;  // of scores
};

constexpr int kMostDecoderLayers = 128;

struct DecodeRow {
  DecodeRowShape shape{};
  const void* hidden = nullptr;               // [hidden]
  const void* cos = nullptr;                  // [dim]
  const void* sin = nullptr;                  // [dim]
  const std::int32_t* block_table = nullptr;  // [max_blocks]
  const std::int32_t* length = nullptr;       // keys of the sequence, the row's own among them
  const std::int64_t* slot = nullptr;         // of the row's key; below 0: kept nowhere
  void* residual = nullptr;                   // [hidden], out
  // [hidden], out: what is still to be added to it; of several ranks, this one's summand.
  void* pending = nullptr;
  // Device memory of decode_row_exchange(shape) bytes, filled with zeros before the first launch.
  // One buffer serves launches of one shape on one GPU only, and keeps its contents between them.
  void* exchange = nullptr;
  // The memory of each of several ranks (models/peer/peer_exchange_launch.h), one's own in its
  // place. Ranks launch the same passes in the same order, and all see the end of one before any of
  // them begins the next.
  void* peers[kMostPeers] = {};
  DecoderLayer layers[kMostDecoderLayers]{};
};

// True if the shape lies within the kernel's bounds and the current device has the shared memory
// that it needs.
bool decode_row_fits(const DecodeRowShape& shape);
std::int64_t decode_row_exchange(const DecodeRowShape& shape);
cudaError_t decode_row(const DecodeRow& row, cudaStream_t stream);

}  // namespace ferry::models::launch
