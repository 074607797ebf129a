// The rows of a batch that each data parallel rank computes, and in which order: pure functions of
// lengths and numbers.
#pragma once

#include <cstdint>
#include <vector>

#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

using RowsOfRanks = std::vector<RolloutBatch::Rows>;  // of each rank, as many

// 0, 1, ...
RolloutBatch::Rows rows_in_order(std::int64_t rows);

// Equal parts, in order; rows that lack at the end are the first ones again. Throws Error(kUsage)
// if there is no row to repeat.
RowsOfRanks even_rows(std::int64_t rows, std::int64_t num_ranks);

// The rows of `epochs` epochs behind each other, each epoch in an order of its own, out of `key`.
RolloutBatch::Rows shuffled_epochs(std::int64_t rows, int epochs, std::uint64_t key);

// The rows of each of dp ranks, its part of every mini-batch behind the other. Mini-batches are
// `mini_batch` rows that follow each other in `order`, whatever dp; `balanced`: parts have about
// the same work (verl ray_trainer._balance_batch), else the same rows follow each other in them.
RowsOfRanks mini_batches_of_ranks(const RolloutBatch& batch,
                                  const RolloutBatch::Rows& order,
                                  std::int64_t mini_batch,
                                  std::int64_t dp,
                                  bool balanced);

// The answers of the ranks, one behind another, in the order of the batch: of a row that several
// computed, the first.
RolloutBatch in_order(const RolloutBatch& answers, const RowsOfRanks& rows);

}  // namespace ferry::trainer
