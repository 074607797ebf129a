// Sharing out sequences so that everybody has about the same work: the largest differencing method
// of Karmarkar and Karp, with the order and the ties of verl (utils/seqlen_balancing.py), so that
// the same lengths give the same parts as there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ferry::trainer {

using Partition = std::vector<std::size_t>;  // indices of sequences

// The cost of a sequence, up to a factor: products with weights, and causal attention (verl's model
// of a layer 4096 wide).
constexpr std::int64_t calculate_workload(std::int64_t seqlen) {
  return 24576 * seqlen + seqlen * seqlen;
}

// Every index in exactly one of `k` parts, ascending in each; the part with the largest sum first.
// With `equal_size` all have as many. Throws Error(kUsage) if there are fewer values than parts, or
// with equal_size no multiple of them.
std::vector<Partition> karmarkar_karp(std::span<const std::int64_t> values,
                                      std::size_t k,
                                      bool equal_size);

}  // namespace ferry::trainer
