// Collectives of small messages, and gathers of any size, between GPUs of one host, by kernels that
// write to each other's memory (CUDA IPC over NVLink). A message of 8 KB takes a few microseconds,
// a fraction of what NCCL needs. Results depend on the ranks' order only, so that they are the same
// at every run, and on every rank. Works inside of CUDA graphs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::models {

enum class PeerOperation : std::uint8_t {
  kAllReduce,          // [...] -> the sum over ranks
  kReduceScatter,      // [size * n, ...] -> [n, ...]: this rank's part of the sum
  kAllGather,          // [n, ...] -> [size * n, ...]
  kAllGatherChannels,  // [n, channels] -> [n, size * channels]
};

class PeerMemory {
 public:
  // Texts of all ranks, in their order.
  using Gather = std::function<std::vector<std::string>(std::string_view mine)>;

  // Called by all of `size` ranks, each on its own GPU. Returns null on all of them if they are
  // processes of several hosts or of one process, more than eight, or a GPU cannot write to the
  // memory of another. Takes some 100 MiB of the GPU's memory.
  static std::unique_ptr<PeerMemory> make(int rank,
                                          int size,
                                          at::Device device,
                                          const Gather& gather);
  virtual ~PeerMemory() = default;

  // True if the message is of a type and size that exchange() takes: the same on all ranks, since
  // their messages are alike. Sums are of bf16, fp32 or int32.
  virtual bool takes(PeerOperation operation, const at::Tensor& mine) const = 0;
  // Called by all ranks in the same order, on one stream at a time. Sums of bf16 add up in fp32, in
  // the order of the ranks. A rank that never comes keeps the kernel waiting: see done().
  virtual at::Tensor exchange(PeerOperation operation, const at::Tensor& mine) = 0;

  // [n, ...] of [size * n] rows: row i is row places[i] of `mine` of the one rank for which that
  // is less than `end`. mine [rows, ...], places [size * n] int64 and end [1] int32 on the device.
  virtual bool takes_rows(const at::Tensor& mine, const at::Tensor& places) const = 0;
  virtual at::Tensor exchange_rows(const at::Tensor& mine,
                                   const at::Tensor& places,
                                   const at::Tensor& end) = 0;

  // Asks whether all that the current stream has been given is done. Empty while a graph is being
  // captured.
  virtual std::function<bool()> done() const = 0;

  // The memory of each rank, as this one has mapped it, for kernels with words of their own
  // (PeerLayout in peer_exchange_launch.h).
  virtual const std::vector<void*>& memory() const = 0;

 protected:
  PeerMemory() = default;
  PeerMemory(const PeerMemory&) = default;
  PeerMemory& operator=(const PeerMemory&) = default;
};

}  // namespace ferry::models
