#include <type_traits>

#include "models/kernels/cuda/cuda_element.cuh"
#include "models/peer/peer_exchange_launch.h"

// Ranks write to each other's memory and read their own only. Protocols:
//   - small messages go in words of 8 bytes, 4 of data and 4 of tag, the number of the exchange. A
//     word is written and read whole, so that whoever sees the tag has the data (NCCL's LL).
//   - others go as they are. Each thread block then tells its counterparts on the other ranks that
//     its part has been sent, by a flag with system-wide release, and waits for theirs.
//
//   - gathers of more pass through slots of their own, part by part: a block sends the next part
//     while the one before it is on its way.
//
// An exchange ends on a rank when it has something from every other, whose exchange has begun
// then and whose exchange before has ended, for kernels of a stream follow each other. So nobody
// reads any more what was written two exchanges ago, and two halves of the memory suffice.
namespace ferry::models::launch {
namespace {

using Bf16 = __nv_bfloat16;

constexpr int kSmallThreads = 256;
constexpr int kBulkThreads = 512;
constexpr int kAtOnce = 4;  // loads of a thread on their way

// The sums of the elements in 4 bytes, over ranks in their order.
template <typename T>
struct Sum;
template <>
struct Sum<Bf16> {
  float low, high;
  __device__ void begin(std::uint32_t word) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  }
  __device__ void add(std::uint32_t word) {
    low = __fadd_rn(low, __uint_as_float(word << 16));
    high = __fadd_rn(high, __uint_as_float(word & 0xffff0000u));
  }
  __device__ std::uint32_t word() const {
    const auto pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
};
template <>
struct Sum<float> {
  float value;
  __device__ void begin(std::uint32_t word) { value = __uint_as_float(word); }
  __device__ void add(std::uint32_t word) { value = __fadd_rn(value, __uint_as_float(word)); }
  __device__ std::uint32_t word() const { return __float_as_uint(value); }
};
template <>
struct Sum<std::uint32_t> {
  std::uint32_t value;
  __device__ void begin(std::uint32_t word) { value = word; }
  __device__ void add(std::uint32_t word) { value += word; }
  __device__ std::uint32_t word() const { return value; }
};

struct Layout {
  std::int64_t small, bulk, results, bulk_bytes, stream, part_bytes;
};

template <typename Exchange>
__device__ PeerHeader& header_of(const Exchange& x, int rank) {
  return *reinterpret_cast<PeerHeader*>(x.memory[rank]);
}

// The number of the exchange that begins.
template <typename Exchange>
__device__ std::uint32_t next_number(const Exchange& x) {
  return *const_cast<volatile std::uint32_t*>(&header_of(x, x.rank).exchanges) + 1;
}

__device__ void send_tagged(uint4* to, uint2 data, std::uint32_t tag) {
  const auto with_tag = [&](std::uint32_t word) {
    return static_cast<std::uint64_t>(tag) << 32 | word;
  };
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(with_tag(data.x)),
               "l"(with_tag(data.y))
               : "memory");
}
__device__ uint2 receive_tagged(const uint4* from, std::uint32_t tag) {
  std::uint64_t first;
  std::uint64_t second;
  do {
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(first), "=l"(second)
                 : "l"(from)
                 : "memory");
  } while (static_cast<std::uint32_t>(first >> 32) != tag ||
           static_cast<std::uint32_t>(second >> 32) != tag);
  return {static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(second)};
}

// Says that all has been sent that this thread, and those it met at a barrier, have written.
__device__ void say(std::uint32_t* to, std::uint32_t number) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(number) : "memory");
}
// Waits until it has been said. The number may be some ahead by then.
__device__ void hear(const std::uint32_t* from, std::uint32_t number) {
  constexpr std::uint32_t kMostAhead = kStreamSlots;
  std::uint32_t last;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(last) : "l"(from) : "memory");
  } while (last - number > kMostAhead);
}

// Tells rank `peer` that this block has sent it all of the phase.
template <typename Exchange>
__device__ void tell(const Exchange& x, int phase, int peer, std::uint32_t number) {
  say(&header_of(x, peer).sent[phase][x.rank][blockIdx.x], number);
}

// Waits for that block of rank `peer` to do so.
template <typename Exchange>
__device__ void await(const Exchange& x, int phase, int peer, int block, std::uint32_t number) {
  hear(&header_of(x, x.rank).sent[phase][peer][block], number);
}

// Tells the other ranks' blocks of this number that this one has sent all of the phase, and waits
// for theirs.
__device__ void meet(const PeerExchange& x, int phase, std::uint32_t number) {
  __syncthreads();
  const int peer = static_cast<int>(threadIdx.x);
  if (peer < x.size && peer != x.rank) {
    tell(x, phase, peer, number);
    await(x, phase, peer, static_cast<int>(blockIdx.x), number);
  }
  __syncthreads();
}

// The same of all blocks of all ranks, this one among them.
__device__ void meet_all(const PeerRows& x, std::uint32_t number) {
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < x.size) tell(x, 0, thread, number);
  const int blocks = static_cast<int>(gridDim.x);
  for (int i = thread; i < x.size * blocks; i += kBulkThreads)
    await(x, 0, i / blocks, i % blocks, number);
  __syncthreads();
}

// Adds `count` to a number of this rank's header when the last block ends.
template <typename Exchange>
__device__ void end_exchange(const Exchange& x,
                             std::uint32_t PeerHeader::*number = &PeerHeader::exchanges,
                             std::uint32_t count = 1) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  auto& header = header_of(x, x.rank);
  if (atomicInc(&header.ended, gridDim.x - 1) == gridDim.x - 1) atomicAdd(&(header.*number), count);
}

// The place of unit number `unit` of rank `from` in the result of a gather; `run` is in units.
__device__ std::uint32_t place_of(std::uint32_t unit, std::uint32_t run, int size, int from) {
  return (unit / run * static_cast<std::uint32_t>(size) + static_cast<std::uint32_t>(from)) * run +
         unit % run;
}

template <PeerKind kind>
constexpr bool kScatters = kind == PeerKind::kScatterSum || kind == PeerKind::kSumAndGather;

template <PeerKind kind, typename T>
__global__ __launch_bounds__(kSmallThreads) void exchange_small(
    const __grid_constant__ PeerExchange x, const Layout layout) {
  constexpr std::int64_t kBytes = sizeof(uint2);
  release_dependents();
  wait_for_inputs();
  const std::uint32_t tag = next_number(x);
  const auto words_from = [&](int at, int from) {
    return reinterpret_cast<uint4*>(x.memory[at] + layout.small) +
           ((tag & 1) * x.size + from) * (kMostSmallBytes / kBytes);
  };
  const auto* const mine = static_cast<const unsigned char*>(x.mine);
  auto* const result = static_cast<unsigned char*>(x.result);
  const auto first = static_cast<std::int64_t>(blockIdx.x) * kSmallThreads + threadIdx.x;
  const auto step = static_cast<std::int64_t>(gridDim.x) * kSmallThreads;
  const auto units = x.bytes / kBytes;
  for (auto unit = first; unit < units; unit += step) {
    for (int i = 1; i < x.size; ++i) {
      const int peer = (x.rank + i) % x.size;
      const auto* const from = mine + (kScatters<kind> ? peer * x.bytes : 0) + unit * kBytes;
      send_tagged(words_from(peer, x.rank) + unit, *reinterpret_cast<const uint2*>(from), tag);
    }
  }
  for (auto unit = first; unit < units; unit += step) {
    const auto of_rank = [&](int rank) {
      if (rank != x.rank) return receive_tagged(words_from(x.rank, rank) + unit, tag);
      const auto* const own = mine + (kScatters<kind> ? rank * x.bytes : 0) + unit * kBytes;
      return *reinterpret_cast<const uint2*>(own);
    };
    if constexpr (kind == PeerKind::kGather) {
      const auto run = static_cast<std::uint32_t>(x.run / kBytes);
      for (int rank = 0; rank < x.size; ++rank)
        reinterpret_cast<uint2*>(
            result)[place_of(static_cast<std::uint32_t>(unit), run, x.size, rank)] = of_rank(rank);
    } else {
      Sum<T> sums[2];
      const auto begin = of_rank(0);
      sums[0].begin(begin.x);
      sums[1].begin(begin.y);
      for (int rank = 1; rank < x.size; ++rank) {
        const auto more = of_rank(rank);
        sums[0].add(more.x);
        sums[1].add(more.y);
      }
      *reinterpret_cast<uint2*>(result + unit * kBytes) = {sums[0].word(), sums[1].word()};
    }
  }
  end_exchange(x);
}

// Calls `body` for each of the block's units that is this thread's, kAtOnce of them unrolled.
template <typename Body>
__device__ void for_each_unit(std::int64_t begin, std::int64_t end, const Body& body) {
#pragma unroll kAtOnce
  for (auto unit = begin + threadIdx.x; unit < end; unit += kBulkThreads) body(unit);
}

template <typename T>
__device__ uint4 sum_of_ranks(const PeerExchange& x,
                              const uint4* own,
                              const uint4* received,
                              std::int64_t stride,
                              std::int64_t unit) {
  Sum<T> sums[4];
  for (int rank = 0; rank < x.size; ++rank) {
    const uint4 part = rank == x.rank ? own[unit] : __ldcg(received + rank * stride + unit);
    const std::uint32_t words[] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (rank == 0)
        sums[i].begin(words[i]);
      else
        sums[i].add(words[i]);
    }
  }
  return {sums[0].word(), sums[1].word(), sums[2].word(), sums[3].word()};
}

template <PeerKind kind, typename T>
__global__ __launch_bounds__(kBulkThreads) void exchange_bulk(
    const __grid_constant__ PeerExchange x, const Layout layout) {
  release_dependents();
  wait_for_inputs();
  const std::uint32_t number = next_number(x);
  const auto stride = layout.bulk_bytes / kUnitBytes;
  const auto half = (number & 1) * x.size * stride;
  const auto received_at = [&](int rank, std::int64_t area) {
    return reinterpret_cast<uint4*>(x.memory[rank] + area) + half;
  };
  const auto* const mine = static_cast<const uint4*>(x.mine);
  auto* const result = static_cast<uint4*>(x.result);
  const auto units = x.bytes / kUnitBytes;
  const auto of_block = ceil_div(units, gridDim.x);
  const auto begin = of_block * blockIdx.x;
  const auto end = min(begin + of_block, units);
  const auto run = static_cast<std::uint32_t>(x.run / kUnitBytes);
  const auto place = [&](int rank, std::int64_t unit) {
    return place_of(static_cast<std::uint32_t>(unit), run, x.size, rank);
  };
  for (int i = 1; i < x.size; ++i) {
    const int peer = (x.rank + i) % x.size;
    const auto* const from = mine + (kScatters<kind> ? peer * units : 0);
    auto* const to = received_at(peer, layout.bulk) + x.rank * stride;
    for_each_unit(begin, end, [&](std::int64_t unit) { to[unit] = from[unit]; });
  }
  if constexpr (kind == PeerKind::kGather)
    for_each_unit(begin, end, [&](std::int64_t unit) { result[place(x.rank, unit)] = mine[unit]; });
  meet(x, 0, number);
  const auto* const received = received_at(x.rank, layout.bulk);
  if constexpr (kind == PeerKind::kGather) {
    for (int i = 1; i < x.size; ++i) {
      const int peer = (x.rank + i) % x.size;
      for_each_unit(begin, end, [&](std::int64_t unit) {
        result[place(peer, unit)] = __ldcg(received + peer * stride + unit);
      });
    }
  } else if constexpr (kind != PeerKind::kSumAndGather) {
    const auto* const own = mine + (kScatters<kind> ? x.rank * units : 0);
    for_each_unit(begin, end, [&](std::int64_t unit) {
      result[unit] = sum_of_ranks<T>(x, own, received, stride, unit);
    });
  } else {
    for_each_unit(begin, end, [&](std::int64_t unit) {
      const auto sum = sum_of_ranks<T>(x, mine + x.rank * units, received, stride, unit);
      result[x.rank * units + unit] = sum;
      for (int i = 1; i < x.size; ++i) {
        const int peer = (x.rank + i) % x.size;
        received_at(peer, layout.results)[x.rank * stride + unit] = sum;
      }
    });
    meet(x, 1, number);
    for (int i = 1; i < x.size; ++i) {
      const int peer = (x.rank + i) % x.size;
      for_each_unit(begin, end, [&](std::int64_t unit) {
        result[peer * units + unit] =
            __ldcg(received_at(x.rank, layout.results) + peer * stride + unit);
      });
    }
  }
  end_exchange(x);
}

// A gather of any size, part by part. A block that has part n of another rank's block knows that
// this one has read all up to part n - 2. It sends part n + 1 before it waits for part n, and so
// when the other has read up to part n - 3, whose slot it takes.
__global__ __launch_bounds__(kBulkThreads) void gather_stream(
    const __grid_constant__ PeerExchange x, const Layout layout) {
  static_assert(kStreamSlots == 4);
  release_dependents();
  wait_for_inputs();
  const std::uint32_t before = *const_cast<volatile std::uint32_t*>(&header_of(x, x.rank).streamed);
  const auto units = x.bytes / kUnitBytes;
  const auto of_part = layout.part_bytes / kUnitBytes;
  const auto of_blocks = of_part * gridDim.x;
  const auto parts = static_cast<std::uint32_t>(ceil_div(units, of_blocks));
  const auto run = static_cast<std::uint32_t>(x.run / kUnitBytes);
  const auto* const mine = static_cast<const uint4*>(x.mine);
  auto* const result = static_cast<uint4*>(x.result);
  const int thread = static_cast<int>(threadIdx.x);
  const bool has_peer = thread < x.size && thread != x.rank;
  const auto slot_of = [&](int at, int from, std::uint32_t part) {
    const auto slot = (before + part) % kStreamSlots * x.size + from;
    return reinterpret_cast<uint4*>(x.memory[at] + layout.stream) +
           (slot * kMostPeerBlocks + blockIdx.x) * of_part;
  };
  // Calls `body` for this thread's units of a part, with their numbers in it and in the message.
  const auto each_of_part = [&](std::uint32_t part, const auto& body) {
    const auto begin = part * of_blocks + blockIdx.x * of_part;
    for_each_unit(0, min(of_part, units - begin),
                  [&](std::int64_t unit) { body(unit, begin + unit); });
  };
  const auto place = [&](int rank, std::int64_t unit) {
    return place_of(static_cast<std::uint32_t>(unit), run, x.size, rank);
  };
  const auto send = [&](std::uint32_t part) {
    if (part >= parts) return;
    for (int i = 1; i < x.size; ++i) {
      const int peer = (x.rank + i) % x.size;
      auto* const to = slot_of(peer, x.rank, part);
      each_of_part(part, [&](std::int64_t at, std::int64_t unit) { to[at] = mine[unit]; });
    }
    __syncthreads();
    if (has_peer) say(&header_of(x, thread).streams[x.rank][blockIdx.x], before + part + 1);
    each_of_part(
        part, [&](std::int64_t, std::int64_t unit) { result[place(x.rank, unit)] = mine[unit]; });
  };
  send(0);
  for (std::uint32_t part = 0; part < parts; ++part) {
    send(part + 1);
    if (has_peer) hear(&header_of(x, x.rank).streams[thread][blockIdx.x], before + part + 1);
    __syncthreads();
    for (int i = 1; i < x.size; ++i) {
      const int peer = (x.rank + i) % x.size;
      const auto* const from = slot_of(x.rank, peer, part);
      each_of_part(part, [&](std::int64_t at, std::int64_t unit) {
        result[place(peer, unit)] = __ldcg(from + at);
      });
    }
  }
  end_exchange(x, &PeerHeader::streamed, parts);
}

// A warp sends a row to its place in the result's rank, which then has all of its own in order.
__global__ __launch_bounds__(kBulkThreads) void exchange_rows(const __grid_constant__ PeerRows x,
                                                              const Layout layout) {
  constexpr int kLanes = 32;
  constexpr int kWarps = kBulkThreads / kLanes;
  release_dependents();
  wait_for_inputs();
  const std::uint32_t number = next_number(x);
  const auto half = (number & 1) * x.size * (layout.bulk_bytes / kUnitBytes);
  const auto received_at = [&](std::int64_t rank) {
    return reinterpret_cast<uint4*>(x.memory[rank] + layout.bulk) + half;
  };
  const auto row_units = x.row_bytes / kUnitBytes;
  const auto end = static_cast<std::int64_t>(*x.end);
  const auto lane = static_cast<int>(threadIdx.x) % kLanes;
  const auto first = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / kLanes;
  for (auto i = first; i < x.size * x.count; i += gridDim.x * kWarps) {
    const auto rank = i / x.count;
    const auto row = i % x.count;
    const auto place = x.places[rank * x.rows + x.first + row];
    if (place >= end) continue;
    const auto* const from = static_cast<const uint4*>(x.mine) + place * row_units;
    auto* const to = received_at(rank) + row * row_units;
#pragma unroll kAtOnce
    for (std::int64_t unit = lane; unit < row_units; unit += kLanes) to[unit] = from[unit];
  }
  meet_all(x, number);
  const auto units = x.count * row_units;
  const auto of_block = ceil_div(units, gridDim.x);
  const auto begin = of_block * blockIdx.x;
  const auto* const received = received_at(x.rank);
  for_each_unit(begin, min(begin + of_block, units), [&](std::int64_t unit) {
    static_cast<uint4*>(x.result)[x.first * row_units + unit] = __ldcg(received + unit);
  });
  end_exchange(x);
}

Layout layout_of(int size) {
  const PeerLayout of_memory{.size = size};
  return {.small = of_memory.small(),
          .bulk = of_memory.bulk(),
          .results = of_memory.results(),
          .bulk_bytes = of_memory.bulk_bytes(),
          .stream = of_memory.stream(),
          .part_bytes = of_memory.part_bytes()};
}

unsigned blocks_for(std::int64_t units, int threads) {
  return static_cast<unsigned>(
      std::clamp<std::int64_t>(ceil_div(units, threads), 1, kMostPeerBlocks));
}

template <PeerKind kind, typename T>
cudaError_t launch_exchange(const PeerExchange& x, cudaStream_t stream) {
  const auto layout = layout_of(x.size);
  if constexpr (kind != PeerKind::kSumAndGather) {
    if (x.bytes <= kMostSmallBytes)
      return launch_dependent(
          exchange_small<kind, T>,
          blocks_for(x.bytes / static_cast<std::int64_t>(sizeof(uint2)), kSmallThreads),
          kSmallThreads, 0, stream, x, layout);
  }
  return launch_dependent(exchange_bulk<kind, T>, blocks_for(x.bytes / kUnitBytes, kBulkThreads),
                          kBulkThreads, 0, stream, x, layout);
}

template <typename T>
cudaError_t launch_sum(const PeerExchange& x, cudaStream_t stream) {
  switch (x.kind) {
    case PeerKind::kSum:
      return launch_exchange<PeerKind::kSum, T>(x, stream);
    case PeerKind::kScatterSum:
      return launch_exchange<PeerKind::kScatterSum, T>(x, stream);
    case PeerKind::kSumAndGather:
      return launch_exchange<PeerKind::kSumAndGather, T>(x, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t peer_exchange(const PeerExchange& exchange, cudaStream_t stream) {
  const bool streams = exchange.bytes > PeerLayout{.size = exchange.size}.bulk_bytes();
  if (exchange.bytes <= 0 || exchange.bytes % kUnitBytes != 0 ||
      (streams && exchange.kind != PeerKind::kGather))
    return cudaErrorInvalidValue;
  if (exchange.kind == PeerKind::kGather) {
    if (exchange.run <= 0 || exchange.run % kUnitBytes != 0 || exchange.bytes % exchange.run != 0)
      return cudaErrorInvalidValue;
    if (streams)
      return launch_dependent(gather_stream, kMostPeerBlocks, kBulkThreads, 0, stream, exchange,
                              layout_of(exchange.size));
    return launch_exchange<PeerKind::kGather, std::uint32_t>(exchange, stream);
  }
  switch (exchange.element) {
    case PeerElement::kBf16:
      return launch_sum<Bf16>(exchange, stream);
    case PeerElement::kFloat:
      return launch_sum<float>(exchange, stream);
    case PeerElement::kInt32:
      return launch_sum<std::uint32_t>(exchange, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t peer_rows(const PeerRows& rows, cudaStream_t stream) {
  if (rows.count <= 0 || rows.first + rows.count > rows.rows || rows.row_bytes <= 0 ||
      rows.row_bytes % kUnitBytes != 0 || rows.count > rows.most_rows())
    return cudaErrorInvalidValue;
  const auto blocks = blocks_for(rows.count * rows.row_bytes / kUnitBytes, kBulkThreads);
  return launch_dependent(exchange_rows, blocks, kBulkThreads, 0, stream, rows,
                          layout_of(rows.size));
}

}  // namespace ferry::models::launch
