// Rows between the ranks that made them and those that compute with them. An answer's columns of
// tokens stay where they were made; rank 0 knows where each row lies (RolloutBatch::kept), and says
// with a call who sends which rows to whom. So no token and no log-probability passes through it.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "trainer/update/rollout_batch.h"

namespace ferry::trainer {

// Rows of one answer.
struct RowPiece {
  std::int64_t answer = 0;
  std::map<std::string, std::string> columns{};  // by the receiver's names, those in the answer
  RolloutBatch::Rows rows{};                     // of the answer
  std::int64_t group = 0;                        // pieces of one have the same columns,
  RolloutBatch::Rows places{};                   // and these of the receiver's rows
};

// All that one rank has of another's rows. A rank may be both.
struct RowParcel {
  int from = 0;
  int to = 0;
  std::vector<RowPiece> pieces{};
};

// Parcels for each receiver, a rank with the rows of the batch that it computes.
std::vector<RowParcel> plan_parcels(const RolloutBatch& batch,
                                    const std::map<int, RolloutBatch::Rows>& receivers);

// The columns that this rank has made and keeps, by the numbers of their answers.
class KeptRows {
 public:
  // Keeps the columns of an answer that do not go with its rows (rollout_columns.h), and takes them
  // out of it. Returns their names.
  std::vector<std::string> keep(std::int64_t answer, RolloutBatch& batch);
  // Forgets all but these.
  void keep_only(std::span<const std::int64_t> answers);
  // The rows of each piece, with its columns. Throws Error(kBug) for an answer that is not kept.
  std::vector<RolloutBatch> find(const RowParcel& parcel) const;

 private:
  std::map<std::int64_t, RolloutBatch> answers_;
};

// Adds the columns of parcels for one receiver to its rows; `found`: of each parcel, of each piece.
void add_columns(RolloutBatch& rows,
                 std::span<const RowParcel> parcels,
                 std::span<const std::vector<RolloutBatch>> found);

}  // namespace ferry::trainer
