#include "trainer/update/rows_of_ranks.h"

#include <cstddef>
#include <numeric>

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "trainer/data/permutation.h"
#include "trainer/engine/micro_batches.h"

namespace ferry::trainer {

RolloutBatch::Rows rows_in_order(std::int64_t rows) {
  RolloutBatch::Rows all(static_cast<std::size_t>(rows));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

RowsOfRanks even_rows(std::int64_t rows, std::int64_t num_ranks) {
  require(num_ranks > 0 && rows > 0, ErrorKind::kUsage,
          "batch: {} rows cannot be shared out to {} ranks", rows, num_ranks);
  const auto count = distckpt::ceil_div(rows, num_ranks);
  RowsOfRanks of_ranks(static_cast<std::size_t>(num_ranks));
  for (std::int64_t i = 0; i < count * num_ranks; ++i)
    of_ranks[static_cast<std::size_t>(i / count)].push_back(i % rows);
  return of_ranks;
}

RolloutBatch::Rows shuffled_epochs(std::int64_t rows, int epochs, std::uint64_t key) {
  const auto count = static_cast<std::uint64_t>(rows);
  RolloutBatch::Rows order;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    const Permutation permutation(count, derive(key, static_cast<std::uint64_t>(epoch)));
    for (std::uint64_t i = 0; i < count; ++i)
      order.push_back(static_cast<std::int64_t>(permutation(i)));
  }
  return order;
}

RowsOfRanks mini_batches_of_ranks(const RolloutBatch& batch,
                                  const RolloutBatch::Rows& order,
                                  std::int64_t mini_batch,
                                  std::int64_t dp,
                                  bool balanced) {
  const auto rows = static_cast<std::int64_t>(order.size());
  require(rows % mini_batch == 0 && mini_batch % dp == 0, ErrorKind::kUsage,
          "{} answers are no multiple of mini-batches of {} on {} data parallel ranks", rows,
          mini_batch, dp);
  const auto part_size = static_cast<std::size_t>(mini_batch / dp);
  RowsOfRanks of_ranks(static_cast<std::size_t>(dp));
  for (auto first = order.begin(); first != order.end(); first += mini_batch) {
    std::vector<std::int64_t> lengths;
    for (auto row = first; row != first + mini_batch; ++row) lengths.push_back(batch.length(*row));
    std::vector<Partition> parts;
    if (balanced)
      parts = balance_batch(lengths, of_ranks.size());
    else
      parts = split_micro_batches(lengths.size(), part_size);
    for (std::size_t rank = 0; rank < of_ranks.size(); ++rank)
      for (const auto place : parts[rank])
        of_ranks[rank].push_back(first[static_cast<std::ptrdiff_t>(place)]);
  }
  return of_ranks;
}

RolloutBatch in_order(const RolloutBatch& answers, const RowsOfRanks& rows) {
  RolloutBatch::Rows places;  // of each row of the batch, the first of its answers
  std::int64_t place = 0;
  for (const auto& of_rank : rows) {
    for (const auto row : of_rank) {
      const auto needed = static_cast<std::size_t>(row) + 1;
      if (places.size() < needed) places.resize(needed, -1);
      if (places[needed - 1] < 0) places[needed - 1] = place;
      ++place;
    }
  }
  require(place == answers.size(), ErrorKind::kBug, "batch: {} answers to {} rows", answers.size(),
          place);
  return answers.select(places);
}

}  // namespace ferry::trainer
