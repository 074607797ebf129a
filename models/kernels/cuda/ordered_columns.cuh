// Products of few rows with lines of a weight, in bf16: each element is one sum along K, as
// cuBLASLt's kernels without split-K and grouped products form it (docs/numerics.md): instructions
// of 16 channels, one after the other, with one accumulator in fp32. A warp has 16 lines and up to
// 8 rows, and copies what it needs through a ring in shared memory, so that the next channels are
// on their way while it multiplies.
#pragma once

#include "models/kernels/cuda/tensor_cores.cuh"
#include "models/kernels/cuda/weight_lines.cuh"

namespace ferry::models::launch {

constexpr int kOrderedLines = 16;  // of a tile
constexpr int kOrderedRows = 8;
constexpr int kRingChannels = 64;  // of a stage of the ring; K is a multiple of it

// A stage has kTiles tiles, [lines, channels], and the rows, [rows, channels]. Units of 16 bytes
// change places within a line, so that eight lines' units lie in different banks.
template <int kTiles, int kStages>
class OrderedColumns {
 public:
  static constexpr int kSharedBytes =
      kStages * (kTiles * kOrderedLines + kOrderedRows) * kRingChannels * 2;

  // `lines` of each tile exist, one at least, `k` numbers each.
  __device__ OrderedColumns(void* shared, const Bf16* const (&tiles)[kTiles], int lines, int k)
      : shared_(static_cast<unsigned char*>(shared)),
        ring_(shared_address(shared)),
        chunks_(k / kRingChannels) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kLinesOfLane; ++i)
        lines_[tile][i] = tiles[tile] +
                          static_cast<std::int64_t>(min(line_of_lane(i), lines - 1)) * k +
                          unit_of_lane() * kWide;
  }

  // The row of this lane's unit number i of a stage's rows, for multiply().
  __device__ static int row_of_lane(int i) {
    return line_of_lane(i);
  }
  static constexpr int kRowsOfLane = 2;

  // Asks for the first of the weight, before rows are known.
  __device__ void begin() {
    for (int chunk = 0; chunk < kStages - 1; ++chunk) {
      copy_lines(chunk);
      commit_copies();
    }
  }

  // Follows begin(), once. rows: those of row_of_lane(), null where there is none. Sums of this
  // lane: element q is of line line_of(q) and row row_of(q).
  __device__ void multiply(const Bf16* const (&rows)[kRowsOfLane], float (&sums)[kTiles][4]) {
    put_first_rows(rows);
    Fragments now;
    Fragments next;
    wait();
    read(0, now);
    for (int chunk = 0; chunk < chunks_; chunk += 2) {
      step(chunk, rows, now, next, sums);
      if (chunk + 1 < chunks_) step(chunk + 1, rows, next, now, sums);
    }
    wait_for_all_but<0>();
    __syncwarp();
  }
  __device__ static int line_of(int q) {
    return lane() / 4 + q / 2 * 8;
  }
  __device__ static int row_of(int q) {
    return lane() % 4 * 2 + q % 2;
  }

 private:
  static constexpr int kUnits = kRingChannels / kWide;  // of a line of a stage
  static constexpr int kLineBytes = kRingChannels * 2;
  static constexpr int kTileBytes = kOrderedLines * kLineBytes;
  static constexpr int kStageBytes = kSharedBytes / kStages;
  static constexpr int kLinesOfLane = kOrderedLines * kUnits / kLanes;
  static constexpr int kSteps = kRingChannels / 16;

  struct Fragments {
    Fragment lines[kTiles][kSteps];
    std::uint32_t rows[kSteps][2];
  };

  __device__ static int lane() {
    return static_cast<int>(threadIdx.x) % kLanes;
  }
  __device__ static int unit_of_lane() {
    return lane() % kUnits;
  }
  __device__ static int line_of_lane(int i) {
    return lane() / kUnits + i * (kLanes / kUnits);
  }
  __device__ static int place(int line, int unit) {
    return line * kLineBytes + (unit ^ line % kUnits) * 16;
  }
  __device__ static int stage(int chunk) {
    return chunk % kStages * kStageBytes;
  }

  __device__ void copy_lines(int chunk) const {
    if (chunk >= chunks_) return;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kLinesOfLane; ++i)
        copy_async(
            ring_ + stage(chunk) + tile * kTileBytes + place(line_of_lane(i), unit_of_lane()),
            lines_[tile][i] + static_cast<std::int64_t>(chunk) * kRingChannels);
  }

  __device__ static int place_of_row(int i) {
    return kTiles * kTileBytes + place(row_of_lane(i), unit_of_lane());
  }
  // Rows that there are not stay zeros in all stages.
  __device__ void put_first_rows(const Bf16* const (&rows)[kRowsOfLane]) const {
#pragma unroll
    for (int chunk = 0; chunk < kStages; ++chunk)
#pragma unroll
      for (int i = 0; i < kRowsOfLane; ++i) {
        const bool there = rows[i] != nullptr && chunk < chunks_;
        if (there && chunk == kStages - 1) continue;
        const auto* const from = rows[i] + chunk * kRingChannels + unit_of_lane() * kWide;
        *reinterpret_cast<uint4*>(shared_ + stage(chunk) + place_of_row(i)) =
            there ? *reinterpret_cast<const uint4*>(from) : uint4{};
      }
  }
  __device__ void copy_rows(int chunk, const Bf16* const (&rows)[kRowsOfLane]) const {
    if (chunk >= chunks_) return;
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i)
      if (rows[i] != nullptr)
        copy_async(
            ring_ + stage(chunk) + place_of_row(i),
            rows[i] + static_cast<std::int64_t>(chunk) * kRingChannels + unit_of_lane() * kWide);
  }

  // Waits for the first of kStages - 1 chunks that are on their way.
  __device__ static void wait() {
    wait_for_all_but<kStages - 2>();
    __syncwarp();
  }

  __device__ void read(int chunk, Fragments& to) const {
    const auto from = ring_ + stage(chunk);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        load_matrices(to.lines[tile][i], from + tile * kTileBytes +
                                             place(lane() % kOrderedLines, 2 * i + lane() / 16));
#pragma unroll
    for (int i = 0; i < kSteps; i += 2) {
      Fragment two;
      load_matrices(two, from + kTiles * kTileBytes + place(lane() % 8, 2 * i + lane() / 8));
      to.rows[i][0] = two[0];
      to.rows[i][1] = two[1];
      to.rows[i + 1][0] = two[2];
      to.rows[i + 1][1] = two[3];
    }
  }

  // Reads the next chunk, and multiplies this one meanwhile.
  __device__ void step(int chunk,
                       const Bf16* const (&rows)[kRowsOfLane],
                       const Fragments& now,
                       Fragments& next,
                       float (&sums)[kTiles][4]) const {
    // The stage of the chunk before this one has been read by all lanes.
    __syncwarp();
    copy_lines(chunk + kStages - 1);
    copy_rows(chunk + kStages - 1, rows);
    commit_copies();
    wait();
    if (chunk + 1 < chunks_) read(chunk + 1, next);
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
        multiply_add(sums[tile], now.lines[tile][i], now.rows[i][0], now.rows[i][1]);
  }

  unsigned char* shared_;
  std::uint32_t ring_;
  int chunks_;
  const Bf16* lines_[kTiles][kLinesOfLane];
};

}  // namespace ferry::models::launch
