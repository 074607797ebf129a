// Exchange of results between thread blocks that run beside each other, without a barrier: words
// carry a tag, of the layer and the launch, and a thread that waits for a word reads it until the
// tag is there (the LL protocol of NCCL). A word is written and read whole, so that nothing needs a
// fence.
//
// The words of kProj and kFc2, of which each tensor parallel rank has a summand, go to all ranks,
// and each adds them up in the order of the ranks.
//
// A word is written again a layer later. By then all have read it: each thread block publishes rows
// of each product, none ends a product before it has read all rows of the one before, and a layer
// has more than one. Two products of a layer go to all ranks.
#pragma once

#include <type_traits>

#include "models/decode_row/decode_row_launch.h"
#include "models/kernels/cuda/cuda_element.cuh"

namespace ferry::models::launch {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kMostSplits = 16;  // of a sequence's keys, over thread blocks

// The sums of two rows of a product.
struct PairOfSums {
  float first;
  float second;
};

struct alignas(8) PairWord {
  std::uint32_t pair;  // two of Bf16
  std::uint32_t tag;
};
struct alignas(16) TripleWord {
  float values[3];
  std::uint32_t tag;
};
constexpr int kOfTriple = 3;

// The number of words that hold the result [dim] of one head over one split of the keys, not yet
// divided by the sum of its weights. One more word holds {largest score times log2 e, sum of
// weights}.
__host__ __device__ constexpr int triples_of(int dim) {
  return ceil_div(dim, kOfTriple);
}

struct Exchange {
  // [rows / 2] of each product, of kFc1 the activated ones; of those that are summed over several
  // ranks [ranks, rows / 2].
  PairWord* results[kProducts];
  TripleWord* attended;  // [heads, kMostSplits, triples_of(dim) + 1]
  std::uint32_t* tag;    // the last one that a launch has used
  std::uint32_t* ended;  // thread blocks of the launch that runs
};

__host__ __device__ inline std::int64_t aligned(std::int64_t bytes) {
  return round_up(bytes, 128);
}
__host__ __device__ inline int rows_of(const DecodeRowShape& s, int product) {
  return product == kQkv ? (s.heads + 2 * s.groups) * s.dim : product == kFc1 ? s.ffn : s.hidden;
}
__host__ __device__ inline int columns_of(const DecodeRowShape& s, int product) {
  return product == kProj ? s.heads * s.dim : product == kFc2 ? s.ffn : s.hidden;
}
__host__ __device__ inline std::int64_t lay_out(const DecodeRowShape& s,
                                                unsigned char* base,
                                                Exchange& to) {
  std::int64_t at = 0;
  const auto take = [&](auto*& pointer, std::int64_t count) {
    pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(base + at);
    at += aligned(count * static_cast<std::int64_t>(sizeof(*pointer)));
  };
  for (int product = 0; product < kProducts; ++product)
    take(to.results[product], rows_of(s, product) / 2);
  take(to.attended, static_cast<std::int64_t>(s.heads) * kMostSplits * (triples_of(s.dim) + 1));
  take(to.tag, 1);
  take(to.ended, 1);
  return at;
}

// The words of a product that is summed over ranks, in the memory of rank `to`, of rank `from`.
__device__ inline PairWord* words_at(const DecodeRow& row, int product, int to, int from) {
  constexpr std::int64_t kWords = kMostRowChannels / 2;  // of a rank
  auto* const words =
      reinterpret_cast<PairWord*>(static_cast<unsigned char*>(row.peers[to]) + PeerLayout{}.rows());
  return words + ((product == kFc2 ? row.shape.ranks : 0) + from) * kWords;
}
__device__ inline bool is_summed(int product) {
  return product == kProj || product == kFc2;
}

// Takes memory that ranks map from each other, where kernels of several models may use it.
__device__ inline void share_with_peers(const DecodeRow& row, Exchange& exchange) {
  const int rank = row.shape.rank;
  auto& header = *static_cast<PeerHeader*>(row.peers[rank]);
  exchange.tag = &header.row_tag;
  exchange.ended = &header.row_blocks;
  for (const int product : {kProj, kFc2})
    exchange.results[product] = words_at(row, product, rank, /*from=*/0);
}

__device__ inline void publish(PairWord* to, const PairOfSums& results, std::uint32_t tag) {
  const auto pair = __floats2bfloat162_rn(results.first, results.second);
  asm volatile(
      "st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to),
      "l"(static_cast<std::uint64_t>(tag) << 32 | *reinterpret_cast<const std::uint32_t*>(&pair))
      : "memory");
}
// The same for all ranks, this one among them.
__device__ inline void publish_to_peers(
    const DecodeRow& row, int product, int word, const PairOfSums& results, std::uint32_t tag) {
  const auto pair = __floats2bfloat162_rn(results.first, results.second);
  const auto tagged =
      static_cast<std::uint64_t>(tag) << 32 | *reinterpret_cast<const std::uint32_t*>(&pair);
  for (int i = 1; i <= row.shape.ranks; ++i) {
    const int to = (row.shape.rank + i) % row.shape.ranks;
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(
                     words_at(row, product, to, row.shape.rank) + word),
                 "l"(tagged)
                 : "memory");
  }
}
__device__ inline void publish(TripleWord* to, const TripleWord& word) {
  const auto low = static_cast<std::uint64_t>(__float_as_uint(word.values[1])) << 32 |
                   __float_as_uint(word.values[0]);
  const auto high = static_cast<std::uint64_t>(word.tag) << 32 | __float_as_uint(word.values[2]);
  asm volatile(
      "{\n.reg .b128 word;\nmov.b128 word, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], word;\n}" ::"l"(to),
      "l"(low), "l"(high)
      : "memory");
}

// Two words, which may not have arrived yet.
struct PairWords {
  PairWord words[2];
  __device__ bool has(std::uint32_t tag) const {
    return words[0].tag == tag && words[1].tag == tag;
  }
};
__device__ inline PairWord unpack(std::uint64_t word) {
  return {static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32)};
}
__device__ inline PairWords peek_two(const PairWord* from) {
  std::uint64_t low;
  std::uint64_t high;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(low), "=l"(high)
               : "l"(from)
               : "memory");
  return {{unpack(low), unpack(high)}};
}
// The same of words that another GPU has written.
__device__ inline PairWords peek_two_of_peer(const PairWord* from) {
  std::uint64_t low;
  std::uint64_t high;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(low), "=l"(high)
               : "l"(from)
               : "memory");
  return {{unpack(low), unpack(high)}};
}
__device__ inline PairWord peek(const PairWord* from) {
  std::uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
  return unpack(word);
}
__device__ inline TripleWord peek(const TripleWord* from) {
  std::uint64_t low;
  std::uint64_t high;
  asm volatile(
      "{\n.reg .b128 word;\nld.relaxed.gpu.global.b128 word, [%2];\n"
      "mov.b128 {%0, %1}, word;\n}"
      : "=l"(low), "=l"(high)
      : "l"(from)
      : "memory");
  return {{__uint_as_float(static_cast<std::uint32_t>(low)),
           __uint_as_float(static_cast<std::uint32_t>(low >> 32)),
           __uint_as_float(static_cast<std::uint32_t>(high))},
          static_cast<std::uint32_t>(high >> 32)};
}

}  // namespace
}  // namespace ferry::models::launch
