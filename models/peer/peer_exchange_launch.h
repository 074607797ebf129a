// The arguments of the kernels in peer_exchange.cu, by raw pointers, so that nvcc never sees
// LibTorch's headers, and the layout of the memory that they exchange through.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace ferry::models::launch {

constexpr int kMostPeers = 8;         // ranks of a group, this one among them
constexpr int kMostPeerBlocks = 128;  // of a kernel
constexpr int kPeerPhases = 2;
constexpr int kStreamSlots = 4;
// Bounds of what a rank sends to one other: by words with a tag, and by blocks of bytes.
constexpr std::int64_t kMostSmallBytes = 256 << 10;
constexpr std::int64_t kMostBulkBytes = 16 << 20;  // over the number of ranks
constexpr std::int64_t kStreamBytes = 32 << 20;    // the slots of all ranks and blocks
// Words that kernels of one row exchange (models/decode_row) have 8 bytes for two channels, of each
// of kRowProducts products, from every rank.
constexpr std::int64_t kMostRowChannels = 16384;
constexpr int kRowProducts = 2;
constexpr std::int64_t kUnitBytes = 16;                            // messages are multiples of it
constexpr std::int64_t kMostGatherBytes = std::int64_t{32} << 30;  // a result, by 32 bits of units

// The beginning of each rank's memory. All is zeros at first.
struct PeerHeader {
  std::uint32_t exchanges;             // that have ended on this rank
  std::uint32_t ended;                 // thread blocks of the one that runs
  std::uint32_t streamed;              // parts of streams that have ended on this rank
  alignas(128) std::uint32_t row_tag;  // the last one that a kernel of one row has used
  std::uint32_t row_blocks;            // thread blocks of such kernels, since ever
  // The number of the last exchange of which that block of that rank has sent everything. This
  // rank's own blocks tell each other, too, where a block reads what others have left.
  alignas(128) std::uint32_t sent[kPeerPhases][kMostPeers][kMostPeerBlocks];
  // The number of the last part of a stream that a block has sent.
  std::uint32_t streams[kMostPeers][kMostPeerBlocks];
};

// Offsets in a rank's memory.
struct PeerLayout {
  std::int64_t size = 0;  // ranks

  // Every other exchange has the same half: nobody reads one when it is written again.
  constexpr std::int64_t bulk_bytes() const {
    return kMostBulkBytes / size / kUnitBytes * kUnitBytes;
  }
  constexpr std::int64_t rows() const {
    return 64 << 10;
  }  // [kRowProducts, size, kMostRowChannels / 2]
  constexpr std::int64_t small() const {
    return rows() + kRowProducts * size * kMostRowChannels / 2 * static_cast<std::int64_t>(8);
  }
  constexpr std::int64_t bulk() const { return small() + 2 * size * 2 * kMostSmallBytes; }
  constexpr std::int64_t results() const { return bulk() + 2 * size * bulk_bytes(); }
  // [kStreamSlots, size, kMostPeerBlocks, part_bytes()]
  constexpr std::int64_t stream() const { return results() + 2 * size * bulk_bytes(); }
  constexpr std::int64_t part_bytes() const {
    return kStreamBytes / (kStreamSlots * size * kMostPeerBlocks) / kUnitBytes * kUnitBytes;
  }
  constexpr std::int64_t bytes() const { return stream() + kStreamBytes; }
};
static_assert(sizeof(PeerHeader) <= 64 << 10);

enum class PeerKind : std::uint8_t {
  kGather,
  kSum,           // every rank sends all of its own to all others, and adds up
  kScatterSum,    // part i of what each rank has goes to rank i, which adds up
  kSumAndGather,  // the same, and then the sums go to all
};
enum class PeerElement : std::uint8_t { kBf16, kFloat, kInt32 };

struct PeerExchange {
  unsigned char* memory[kMostPeers] = {};  // of each rank, as this one has mapped it
  int size = 0;
  int rank = 0;
  PeerKind kind = PeerKind::kGather;
  PeerElement element = PeerElement::kBf16;  // of sums, which are in fp32, or wrap
  const void* mine = nullptr;                // aligned to kUnitBytes, like result
  void* result = nullptr;
  // The bytes that go to each other rank, of scatters a part. A multiple of kUnitBytes, at most
  // PeerLayout::bulk_bytes() but for kGather.
  std::int64_t bytes = 0;
  // kGather: results of ranks alternate after so many bytes; a divisor of `bytes` and a multiple of
  // kUnitBytes.
  std::int64_t run = 0;
};

// Called in the same order by all ranks, on one stream of each. The result is there when the kernel
// ends; the kernel waits for the other ranks' kernels.
cudaError_t peer_exchange(const PeerExchange& exchange, cudaStream_t stream);

// Rows that lie with one rank each, and go to others: row i of all ranks' results is row places[i]
// of what the rank has for which that is less than *end. Called as peer_exchange() is.
struct PeerRows {
  unsigned char* memory[kMostPeers] = {};
  int size = 0;
  int rank = 0;
  const void* mine = nullptr;            // aligned to kUnitBytes, like result
  const std::int64_t* places = nullptr;  // [size * rows]
  const std::int32_t* end = nullptr;
  void* result = nullptr;
  std::int64_t rows = 0;       // of each rank's result, the rows rank * rows, ... of all
  std::int64_t row_bytes = 0;  // a multiple of kUnitBytes
  // The rows of each result that are exchanged: at most most_rows().
  std::int64_t first = 0;
  std::int64_t count = 0;

  std::int64_t most_rows() const {
    return size * PeerLayout{.size = size}.bulk_bytes() / row_bytes;
  }
};
cudaError_t peer_rows(const PeerRows& rows, cudaStream_t stream);

}  // namespace ferry::models::launch
