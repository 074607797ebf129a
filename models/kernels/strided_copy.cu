#include "models/kernels/cuda/cuda_launch.h"

namespace ferry::models::launch {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 8;  // loads of a thread before its first store

struct Ends {
  const char* from = nullptr;
  char* to = nullptr;
};

// The addresses of byte `at` of a box, counted run after run, on both sides.
__device__ Ends place(const StridedBox& box, Ends ends, std::uint32_t at) {
  if (box.run == box.bytes) return {ends.from + at, ends.to + at};
  const std::uint32_t row = at / box.run;
  const std::uint32_t column = at - row * box.run;
  const std::int64_t outer = row / box.inner;
  const std::int64_t inner = row % box.inner;
  return {ends.from + column + outer * box.from_strides[0] + inner * box.from_strides[1],
          ends.to + column + outer * box.to_strides[0] + inner * box.to_strides[1]};
}

template <typename Unit>
__device__ void copy(const StridedBox& box, Ends ends, std::uint32_t begin, std::uint32_t end) {
  constexpr std::uint32_t kStep = kThreads * sizeof(Unit);
  for (std::uint32_t first = begin + threadIdx.x * sizeof(Unit); first < end;
       first += kInFlight * kStep) {
    Unit values[kInFlight];
    char* to[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const std::uint32_t at = first + i * kStep;
      if (at >= end) continue;
      const auto there = place(box, ends, at);
      values[i] = *reinterpret_cast<const Unit*>(there.from);
      to[i] = there.to;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * kStep < end) *reinterpret_cast<Unit*>(to[i]) = values[i];
    }
  }
}

__global__ void __launch_bounds__(kThreads) copy_boxes(const StridedBox* boxes,
                                                       const std::int32_t* box_of_tile,
                                                       const std::int64_t* memories,
                                                       char* staging) {
  const std::int64_t tile = blockIdx.x;
  const auto box = boxes[box_of_tile[tile]];
  const auto memory = [&](std::int32_t number) {
    return number < 0 ? staging : reinterpret_cast<char*>(memories[number]);
  };
  const Ends ends{memory(box.from) + box.from_offset, memory(box.to) + box.to_offset};
  if (ends.from == ends.to) return;
  const auto begin = static_cast<std::uint32_t>((tile - box.first_tile) * kStridedTileBytes);
  const auto end = min(begin + static_cast<std::uint32_t>(kStridedTileBytes), box.bytes);
  const auto misaligned = reinterpret_cast<std::uint64_t>(ends.from) |
                          reinterpret_cast<std::uint64_t>(ends.to) | box.run |
                          static_cast<std::uint64_t>(box.from_strides[0] | box.from_strides[1] |
                                                     box.to_strides[0] | box.to_strides[1]);
  if (misaligned % 16 == 0) {
    copy<uint4>(box, ends, begin, end);
  } else if (misaligned % 8 == 0) {
    copy<std::uint64_t>(box, ends, begin, end);
  } else if (misaligned % 4 == 0) {
    copy<std::uint32_t>(box, ends, begin, end);
  } else if (misaligned % 2 == 0) {
    copy<std::uint16_t>(box, ends, begin, end);
  } else {
    copy<std::uint8_t>(box, ends, begin, end);
  }
}

}  // namespace

cudaError_t strided_copy(const StridedBox* boxes,
                         const std::int32_t* box_of_tile,
                         const std::int64_t* memories,
                         void* staging,
                         std::int64_t tiles,
                         cudaStream_t stream) {
  copy_boxes<<<static_cast<unsigned>(tiles), kThreads, 0, stream>>>(boxes, box_of_tile, memories,
                                                                    static_cast<char*>(staging));
  return cudaGetLastError();
}

}  // namespace ferry::models::launch
