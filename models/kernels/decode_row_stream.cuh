// How a kernel of one row reads weights: a ring in shared memory for each warp, into which the rows
// of all products of all layers that are the warp's own are copied one behind another. The copies
// depend on nothing, so they run ahead over the ends of products and layers, while thread blocks
// wait for each other's results at barriers of the grid.
#pragma once

#include "models/kernels/cuda_element.cuh"
#include "models/kernels/decode_row_launch.h"

namespace ferry::models::launch {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kLanes;
constexpr int kChunk = 8;  // elements of 16 bytes
constexpr int kMostPieceBytes = 4096;
constexpr int kBarriersOfLayer = 5;
enum Product : int { kQkv, kProj, kFc1, kFc2, kProducts };

__device__ void prefetch(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}
// Vectors of weights into L2, by all threads; null: none.
__device__ void prefetch_all(const void* pointer, int elements) {
  constexpr int kLine = 128;
  if (pointer == nullptr) return;
  const int bytes = elements * static_cast<int>(sizeof(Bf16));
  for (int at = static_cast<int>(threadIdx.x) * kLine; at < bytes; at += kThreads * kLine)
    prefetch(static_cast<const char*>(pointer) + at);
}
// What other thread blocks have written since the kernel began.
__device__ uint4 load_fresh(const void* pointer) {
  return __ldcg(static_cast<const uint4*>(pointer));
}
__device__ float low_half(std::uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ float high_half(std::uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}
__device__ void widen_chunk(const uint4& chunk, float (&to)[kChunk]) {
  const std::uint32_t pairs[] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    to[2 * i] = low_half(pairs[i]);
    to[2 * i + 1] = high_half(pairs[i]);
  }
}
__device__ uint4 narrow_chunk(const float (&from)[kChunk]) {
  std::uint32_t pairs[kChunk / 2];
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    const auto pair = __floats2bfloat162_rn(from[2 * i], from[2 * i + 1]);
    pairs[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

__device__ float add_lanes(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}
__device__ float largest_of_lanes(float x) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2)
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// Of all thread blocks. Launches count on: the counter is never set back.
class GridBarrier {
 public:
  __device__ GridBarrier(unsigned long long* arrivals, int layers) : arrivals_(arrivals) {
    const auto of_launch =
        static_cast<unsigned long long>(gridDim.x) * (layers * kBarriersOfLayer - 1);
    if (threadIdx.x == 0) next_ = arrived() / of_launch * of_launch;
  }
  // What a thread block wrote before is there for all that read it fresh afterwards.
  __device__ void wait() {
    __syncthreads();
    if (threadIdx.x == 0) {
      next_ += gridDim.x;
      asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(arrivals_), "l"(1ULL)
                   : "memory");
      while (arrived() < next_) {
      }
    }
    __syncthreads();
  }

 private:
  __device__ unsigned long long arrived() const {
    unsigned long long value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(arrivals_) : "memory");
    return value;
  }
  unsigned long long* arrivals_;
  unsigned long long next_ = 0;
};

// The rows of one product that are a thread block's, each in pieces: piece p is part p % parts of
// its row p / parts.
struct Rows {
  int columns;
  int parts;
  int piece;  // elements of each but the last
  int first;
  int count;
  int half;  // rows from here on lie `jump` rows further down
  int jump;
};

__host__ __device__ int parts_of(int columns) {
  return (columns * static_cast<int>(sizeof(Bf16)) + kMostPieceBytes - 1) / kMostPieceBytes;
}
__host__ __device__ int piece_of(int columns) {
  const int parts = parts_of(columns);
  return ((columns + parts - 1) / parts + kChunk - 1) / kChunk * kChunk;
}

__device__ Rows rows_of(int rows, int columns, bool pairs, int ffn) {
  const auto share = [&](unsigned block) {
    return static_cast<int>(static_cast<long long>(rows) * block / gridDim.x);
  };
  const int first = share(blockIdx.x);
  const int count = share(blockIdx.x + 1) - first;
  return {.columns = columns,
          .parts = parts_of(columns),
          .piece = piece_of(columns),
          .first = first,
          .count = pairs ? 2 * count : count,
          .half = count,
          .jump = pairs ? ffn - count : 0};
}

// One warp's.
class WeightStream {
 public:
  __device__ WeightStream(const DecodeRow& row,
                          const Rows* rows,
                          unsigned char* ring,
                          std::uint64_t* landed,
                          int slots,
                          int slot_bytes)
      : row_(row),
        rows_(rows),
        ring_(ring),
        landed_(landed),
        slots_(slots),
        slot_bytes_(slot_bytes),
        next_piece_(warp()) {
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(read_once_));
    if (lane() == 0) {
      for (int slot = 0; slot < slots_; ++slot)
        asm volatile(
            "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(landed_ + slot)));
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      for (int slot = 0; slot < slots_; ++slot) copy_next(slot);
    }
    __syncwarp();
  }

  // The product of this warp's pieces with `input` [columns], each into its place of `partial`.
  __device__ void multiply(const Rows& rows, const Bf16* input, float* partial) {
    for (int piece = warp(); piece < rows.count * rows.parts; piece += kWarps) {
      const int begin = piece % rows.parts * rows.piece;
      wait_for(slot_);
      const float sum = add_lanes(dot(reinterpret_cast<const uint4*>(ring_ + slot_ * slot_bytes_),
                                      reinterpret_cast<const uint4*>(input + begin),
                                      min(rows.piece, rows.columns - begin) / kChunk));
      if (lane() == 0) {
        partial[piece] = sum;
        copy_next(slot_);
      }
      __syncwarp();
      if (++slot_ == slots_) {
        slot_ = 0;
        phase_ ^= 1;
      }
    }
  }

 private:
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / kLanes; }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % kLanes; }

  __device__ static float dot(const uint4* weights, const uint4* input, int chunks) {
    float sums[2] = {};
#pragma unroll 4
    for (int i = lane(); i < chunks; i += kLanes) {
      float w[kChunk];
      float x[kChunk];
      widen_chunk(weights[i], w);
      widen_chunk(input[i], x);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) sums[j % 2] = fmaf(w[j], x[j], sums[j % 2]);
    }
    return sums[0] + sums[1];
  }

  __device__ void wait_for(int slot) const {
    std::uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{\n.reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n}"
          : "=r"(done)
          : "r"(shared_address(landed_ + slot)), "r"(phase_)
          : "memory");
    }
  }

  __device__ const Bf16* weights() const {
    const auto& layer = row_.layers[next_layer_];
    const void* const all = next_product_ == kQkv    ? layer.qkv
                            : next_product_ == kProj ? layer.proj
                            : next_product_ == kFc1  ? layer.fc1
                                                     : layer.fc2;
    return static_cast<const Bf16*>(all);
  }

  // Begins to copy the piece behind the last one, which is the order of multiply(). One lane.
  __device__ void copy_next(int slot) {
    while (next_layer_ < row_.shape.layers &&
           next_piece_ >= rows_[next_product_].count * rows_[next_product_].parts) {
      next_piece_ = warp();
      if (++next_product_ == kProducts) {
        next_product_ = 0;
        ++next_layer_;
      }
    }
    if (next_layer_ == row_.shape.layers) return;
    const auto& rows = rows_[next_product_];
    const int local = next_piece_ / rows.parts;
    const int begin = next_piece_ % rows.parts * rows.piece;
    const std::int64_t at = rows.first + local + (local >= rows.half ? rows.jump : 0);
    const auto* const from = weights() + at * rows.columns + begin;
    const auto bytes = static_cast<std::uint32_t>(min(rows.piece, rows.columns - begin) *
                                                  static_cast<int>(sizeof(Bf16)));
    const auto landed = shared_address(landed_ + slot);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(landed), "r"(bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(ring_ + slot * slot_bytes_)),
        "l"(from), "r"(bytes), "r"(landed), "l"(read_once_)
        : "memory");
    next_piece_ += kWarps;
  }

  const DecodeRow& row_;
  const Rows* rows_;
  unsigned char* ring_;
  std::uint64_t* landed_;
  int slots_;
  int slot_bytes_;
  std::uint64_t read_once_ = 0;
  int slot_ = 0;
  std::uint32_t phase_ = 0;
  int next_layer_ = 0;
  int next_product_ = 0;
  int next_piece_;
};

}  // namespace
}  // namespace ferry::models::launch
