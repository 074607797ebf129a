// The stream of weights of a kernel for one row: a ring in shared memory into which warps of their
// own copy the thread block's rows of all products of all layers, one behind another. The copies
// depend on nothing, so they run ahead over the ends of products and layers, while thread blocks
// wait for each other's results.
#pragma once

#include "models/decode_row/decode_row_exchange.cuh"

namespace ferry::models::launch {
namespace {

constexpr int kWarps = 16;  // that compute
constexpr int kThreads = kWarps * kLanes;
constexpr int kRowsOfSlot = 2;
constexpr int kCopyWarps = 4;
constexpr int kSlotsApart = kCopyWarps / kRowsOfSlot;  // of one warp's copies
constexpr int kAllThreads = kThreads + kCopyWarps * kLanes;
// Copies of a warp on their way: as many as keep memory busy. More would only queue up, and delay
// the words of other thread blocks.
constexpr int kMostOnTheirWay = 3;
constexpr int kChunk = 8;  // elements of 16 bytes
constexpr int kMostPieceBytes = 3072;
constexpr int kMostChunks = kMostPieceBytes / 16 / kLanes;  // of a piece, of a lane
constexpr int kMostSlots = 64;

// A barrier of the threads that compute.
__device__ inline void sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
}

__device__ inline void prefetch(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}
__device__ inline float low_half(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ inline float high_half(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
__device__ inline void widen_chunk(const uint4& chunk, float (&to)[kChunk]) {
  const std::uint32_t pairs[] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    to[2 * i] = low_half(pairs[i]);
    to[2 * i + 1] = high_half(pairs[i]);
  }
}
__device__ inline std::uint32_t pack(float low, float high) {
  const auto pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&pair);
}

__device__ inline uint4 narrow_chunk(const float (&from)[kChunk]) {
  return {pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]),
          pack(from[6], from[7])};
}

__device__ inline float add_lanes(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}
__device__ inline float largest_of_lanes(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// The rows of one product that are a thread block's, in pairs, each in `parts` pieces: neighbours,
// or a row of gate and the one of up. Piece by piece, a pair takes a slot of the ring.
struct Rows {
  int columns;
  int parts;
  int piece;  // elements of each but the last
  int first;  // of the results; a multiple of two, like results
  int results;
  int pairs;
  bool gated;
  int second;  // how many rows further down a pair's second lies
};

__host__ __device__ inline int parts_of(int columns) {
  return ceil_div(columns * static_cast<int>(sizeof(Bf16)), kMostPieceBytes);
}
__host__ __device__ inline int piece_of(int columns) {
  return round_up(ceil_div(columns, parts_of(columns)), kChunk);
}

__device__ inline Rows own_rows(const DecodeRowShape& shape, int product) {
  const int words = rows_of(shape, product) / 2;
  const auto share = [&](unsigned block) {
    return static_cast<int>(static_cast<long long>(words) * block / gridDim.x) * 2;
  };
  const int first = share(blockIdx.x);
  const int results = share(blockIdx.x + 1) - first;
  const int columns = columns_of(shape, product);
  const bool gated = product == kFc1;
  return {.columns = columns,
          .parts = parts_of(columns),
          .piece = piece_of(columns),
          .first = first,
          .results = results,
          .pairs = gated ? results : results / 2,
          .gated = gated,
          .second = gated ? shape.ffn : 1};
}

// A barrier tells the parity of its phase and no more, so no thread may be two phases off. A thread
// that copies sees every phase of its slots, since their count is a multiple of kSlotsApart. A
// thread that computes waits for a slot when the one kWarps before it has landed, and so all that
// were copied kMostOnTheirWay copies before that one, the slot's former content among them.
struct Ring {
  unsigned char* slots;
  std::uint64_t* full;   // [count] barriers
  std::uint64_t* empty;  // [count]
  int count;
  int piece_bytes;  // of which a slot has kRowsOfSlot
};
constexpr int kFewestSlots = kWarps + kMostOnTheirWay * kSlotsApart;
static_assert(kWarps % kSlotsApart == 0);

__device__ inline void wait_for(const std::uint64_t* barrier, std::uint32_t phase) {
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(phase)
        : "memory");
  }
}
__device__ inline void arrive(const std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
}
__device__ inline void make_ring(const Ring& ring) {
  const auto make = [](const std::uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals));
  };
  for (int slot = static_cast<int>(threadIdx.x); slot < ring.count; slot += kAllThreads) {
    make(ring.full + slot, kRowsOfSlot);
    make(ring.empty + slot, 1);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// A place in the ring, which goes round.
struct Place {
  int slot = 0;
  std::uint32_t phase = 0;
  __device__ void advance(int by, int count) {
    slot += by;
    while (slot >= count) {
      slot -= count;
      phase ^= 1;
    }
  }
};

// Prefetches a vector of weights into L2, by one warp. A null pointer: does nothing.
__device__ inline void prefetch_vector(const void* pointer, int elements) {
  constexpr int kLine = 128;
  if (pointer == nullptr) return;
  for (int at = static_cast<int>(threadIdx.x) % kLanes * kLine; at < elements * 2;
       at += kLanes * kLine)
    prefetch(static_cast<const char*>(pointer) + at);
}
__device__ inline void prefetch_vectors(const DecodeRow& row) {
  for (int index = static_cast<int>(blockIdx.x); index < row.shape.layers;
       index += static_cast<int>(gridDim.x)) {
    const auto& layer = row.layers[index];
    prefetch_vector(layer.attention_norm, row.shape.hidden);
    prefetch_vector(layer.mlp_norm, row.shape.hidden);
    prefetch_vector(layer.qkv_bias, rows_of(row.shape, kQkv));
    prefetch_vector(layer.q_norm, row.shape.dim);
    prefetch_vector(layer.k_norm, row.shape.dim);
  }
}

// Fills the ring, in the order of multiply(). Called by kCopyWarps warps, each with its number
// `warp`: a warp copies the first or the second row of every so many slots, always of the same
// ones.
__device__ inline void copy_weights(const DecodeRow& row,
                                    const Rows* products,
                                    const Ring& ring,
                                    int warp) {
  if (warp == 0) prefetch_vectors(row);
  if (threadIdx.x % kLanes != 0) return;
  const int row_of_slot = warp % kRowsOfSlot;
  std::uint64_t read_once;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(read_once));
  Place place{.phase = 1};        // no thread uses the slots yet
  int unit = warp / kRowsOfSlot;  // of the product: a part of a pair
  place.advance(unit, ring.count);
  Place landed;
  landed.advance(unit, ring.count);
  int on_their_way = 0;
  for (int layer = 0; layer < row.shape.layers; ++layer) {
#pragma unroll 1
    for (int product = 0; product < kProducts; ++product) {
      const Rows rows = products[product];
      const int units = rows.pairs * rows.parts;
      const int step = rows.gated ? 1 : kRowsOfSlot;
      int part = unit % rows.parts;
      const auto* pair = static_cast<const Bf16*>(row.layers[layer].weights[product]) +
                         static_cast<std::int64_t>(rows.first + unit / rows.parts * step +
                                                   row_of_slot * rows.second) *
                             rows.columns;
      const auto bytes_of = [&](int elements) {
        return static_cast<std::uint32_t>(elements) * static_cast<std::uint32_t>(sizeof(Bf16));
      };
      const auto full_bytes = bytes_of(rows.piece);
      const auto last_bytes = bytes_of(rows.columns - (rows.parts - 1) * rows.piece);
      for (; unit < units; unit += kSlotsApart) {
        const auto bytes = part + 1 == rows.parts ? last_bytes : full_bytes;
        const auto* const from = pair + part * rows.piece;
        const auto full = shared_address(ring.full + place.slot);
        const auto to = shared_address(ring.slots +
                                       (place.slot * kRowsOfSlot + row_of_slot) * ring.piece_bytes);
        if (on_their_way == kMostOnTheirWay) {
          wait_for(ring.full + landed.slot, landed.phase);
          landed.advance(kSlotsApart, ring.count);
        } else {
          ++on_their_way;
        }
        wait_for(ring.empty + place.slot, place.phase);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full),
                     "r"(bytes)
                     : "memory");
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[%0], [%1], %2, [%3], %4;" ::"r"(to),
            "l"(from), "r"(bytes), "r"(full), "l"(read_once)
            : "memory");
        place.advance(kSlotsApart, ring.count);
        for (part += kSlotsApart; part >= rows.parts; part -= rows.parts)
          pair += static_cast<std::int64_t>(step) * rows.columns;
      }
      unit -= units;
    }
  }
}

__device__ inline PairOfSums dot(const unsigned char* weights,
                                 int piece_bytes,
                                 const Bf16* input,
                                 int chunks) {
  const auto* const first = reinterpret_cast<const uint4*>(weights);
  const auto* const second = reinterpret_cast<const uint4*>(weights + piece_bytes);
  const auto* const by = reinterpret_cast<const uint4*>(input);
  float sums[kRowsOfSlot][2] = {};
#pragma unroll
  for (int n = 0; n < kMostChunks; ++n) {
    const int i = static_cast<int>(threadIdx.x) % kLanes + n * kLanes;
    if (i >= chunks) continue;
    float w[kChunk];
    float v[kChunk];
    float x[kChunk];
    widen_chunk(by[i], x);
    widen_chunk(first[i], w);
    widen_chunk(second[i], v);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      sums[0][j % 2] = fmaf(w[j], x[j], sums[0][j % 2]);
      sums[1][j % 2] = fmaf(v[j], x[j], sums[1][j % 2]);
    }
  }
  return {add_lanes(sums[0][0] + sums[0][1]), add_lanes(sums[1][0] + sums[1][1])};
}

// The product of the thread block's rows with `input` [columns], a pair's sums in each place of
// `partial`. `place` is where the product's first slot lies, and then the next one's.
__device__ inline void multiply(
    const Rows& rows, const Ring& ring, const Bf16* input, Place& place, PairOfSums* partial) {
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int units = rows.pairs * rows.parts;
  Place at = place;
  at.advance(warp, ring.count);
  for (int unit = warp; unit < units; unit += kWarps) {
    const int begin = unit % rows.parts * rows.piece;
    wait_for(ring.full + at.slot, at.phase);
    const auto sums = dot(ring.slots + at.slot * kRowsOfSlot * ring.piece_bytes, ring.piece_bytes,
                          input + begin, min(rows.piece, rows.columns - begin) / kChunk);
    if (lane == 0) {
      arrive(ring.empty + at.slot);
      partial[unit] = sums;
    }
    at.advance(kWarps, ring.count);
  }
  place.advance(units, ring.count);
}

}  // namespace
}  // namespace ferry::models::launch
