#include "trainer/engine/micro_batches.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <type_traits>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "models/distributed/messages.h"

namespace ferry::trainer {
namespace {

using Lengths = std::span<const std::int64_t>;

std::vector<std::int64_t> workloads(Lengths seqlens) {
  std::vector<std::int64_t> values(seqlens.size());
  std::ranges::transform(seqlens, values.begin(), calculate_workload);
  return values;
}

std::int64_t sum_of(const Partition& part, Lengths values) {
  return std::transform_reduce(part.begin(), part.end(), std::int64_t{0}, std::plus(),
                               [&](std::size_t i) { return values[i]; });
}

// Every second one from the first on, and the others backwards: of an ascending list, the largest
// are in the middle.
template <typename T>
std::vector<T> small_at_both_ends(const std::vector<T>& ascending) {
  std::vector<T> result;
  for (std::size_t i = 0; i < ascending.size(); i += 2) result.push_back(ascending[i]);
  for (std::size_t i = ascending.size() / 2; i-- > 0;) result.push_back(ascending[2 * i + 1]);
  return result;
}

std::vector<Partition> in_order_of_pipeline(std::vector<Partition> parts, Lengths work) {
  std::ranges::sort(parts, std::greater(), [&](const Partition& part) {
    return std::pair(sum_of(part, work), part.front());
  });
  // Out of a descending order: every second one backwards, then the others.
  std::vector<Partition> result;
  for (std::size_t i = (parts.size() + 1) / 2; i-- > 0;) result.push_back(parts[2 * i]);
  for (std::size_t i = 1; i < parts.size(); i += 2) result.push_back(parts[i]);
  return result;
}

}  // namespace

std::vector<Partition> balance_batch(Lengths seqlens, std::size_t dp) {
  const auto work = workloads(seqlens);
  auto parts = karmarkar_karp(work, dp, /*equal_size=*/true);
  for (auto& part : parts) {
    std::ranges::stable_sort(part, {}, [&](std::size_t i) { return work[i]; });
    part = small_at_both_ends(part);
  }
  return parts;
}

std::vector<std::vector<Partition>> rearrange_micro_batches(
    const std::vector<std::vector<std::int64_t>>& seqlens, const DynamicBatchOptions& options) {
  const auto step = options.num_batches_divided_by;
  std::size_t fewest = 0;  // sequences of the poorest rank
  std::size_t num_micro_batches = 1;
  for (std::size_t rank = 0; rank < seqlens.size(); ++rank) {
    const auto& mine = seqlens[rank];
    fewest = rank == 0 ? mine.size() : std::min(fewest, mine.size());
    const auto longest = mine.empty() ? 0 : std::ranges::max(mine);
    require(longest <= options.max_token_len, ErrorKind::kUsage,
            "a sequence of {} tokens is longer than the budget of a micro-batch, {}", longest,
            options.max_token_len);
    const auto tokens = std::accumulate(mine.begin(), mine.end(), std::int64_t{0});
    const auto needed = distckpt::ceil_div(tokens, options.max_token_len);
    num_micro_batches =
        std::max(num_micro_batches, std::min(static_cast<std::size_t>(needed), mine.size()));
  }
  for (auto count = distckpt::round_up(num_micro_batches, step);; count += step) {
    if (count > fewest) {
      throw Error(
          ErrorKind::kUsage,
          fmt::format("{} micro-batches are needed, and a rank has {} sequences", count, fewest),
          "a larger batch, or a larger budget of tokens");
    }
    std::vector<std::vector<Partition>> ranks;
    bool fits = true;
    for (const auto& mine : seqlens) {
      const auto work = workloads(mine);
      auto parts = karmarkar_karp(work, count, /*equal_size=*/false);
      fits = fits && std::ranges::all_of(parts, [&](const Partition& part) {
               return sum_of(part, mine) <= options.max_token_len;
             });
      ranks.push_back(in_order_of_pipeline(std::move(parts), work));
    }
    if (fits) return ranks;
  }
}

std::vector<Partition> split_micro_batches(std::size_t num_sequences,
                                           std::size_t micro_batch_size) {
  require(micro_batch_size > 0, ErrorKind::kUsage, "a micro-batch needs a sequence at least");
  std::vector<Partition> parts;
  for (std::size_t i = 0; i < num_sequences; ++i) {
    if (i % micro_batch_size == 0) parts.emplace_back();
    parts.back().push_back(i);
  }
  return parts;
}

std::vector<std::vector<std::int64_t>> gather_seqlens(const models::ProcessGroup& dp,
                                                      Lengths mine) {
  return models::gather(dp, std::vector(mine.begin(), mine.end()));
}

models::SamplingMask concat(const std::vector<models::SamplingMask>& masks) {
  models::SamplingMask all{.offsets = {0}};
  std::vector<at::Tensor> ids;
  for (const auto& mask : masks) {
    const auto begin = all.offsets.back();
    for (std::size_t i = 1; i < mask.offsets.size(); ++i)
      all.offsets.push_back(begin + mask.offsets[i]);
    ids.push_back(mask.token_ids);
  }
  all.token_ids = at::cat(ids);
  return all;
}

std::vector<models::SequencePartition> pack_micro_batches(
    const std::vector<at::Tensor>& sequences,
    const std::vector<Partition>& parts,
    const models::ParallelState& mesh,
    const std::vector<at::Tensor>& scored,
    const std::vector<models::SamplingMask>& masks,
    const VisualSequences& visual) {
  std::vector<models::SequencePartition> batches;
  for (const auto& part : parts) {
    const auto chosen = [&](const auto& all) {
      std::remove_cvref_t<decltype(all)> some;
      for (const auto i : part) some.push_back(all.at(i));
      return some;
    };
    auto packed = models::pack(chosen(sequences));
    if (!scored.empty()) packed.scored = at::cat(chosen(scored));
    if (!masks.empty()) packed.sampling_mask = concat(chosen(masks));
    if (!visual.empty()) packed.positions = visual_positions(chosen(visual), chosen(sequences));
    batches.emplace_back(packed, mesh);
  }
  return batches;
}

BatchShape shape_of(std::span<const models::SequencePartition> batches, std::int64_t cp) {
  BatchShape shape{.num_micro_batches = batches.size()};
  for (const auto& batch : batches) {
    double keys = 0;
    for (const auto& segment : batch.segments()) {
      keys += static_cast<double>(segment.num_queries) * static_cast<double>(segment.num_keys);
      shape.longest_sequence =
          std::max(shape.longest_sequence, distckpt::ceil_div(segment.num_keys, cp));
    }
    const auto tokens = batch.tokens().size(0);
    if (tokens > shape.largest.tokens)
      shape.largest = {.tokens = tokens, .keys = keys / static_cast<double>(tokens)};
  }
  return shape;
}

}  // namespace ferry::trainer
