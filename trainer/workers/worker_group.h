// The ranks of a run as workers that rank 0 calls (verl single_controller): rank 0 runs the
// algorithm and has the batch, the others serve. A method is registered under its name with a
// dispatch, which says for each rank which rows of the batch it computes, and whose answer counts.
// Calls and rows go over Gloo, as bytes on the host; tensors of models never do.
//
// Columns of rows go to rank 0, which decides by them; columns of tokens stay with the rank that
// answered, and go from there to those that compute with them (row_parcels.h).
//
//   workers.add("compute_log_prob", megatron_compute_proto(mesh), compute_log_prob);  // every rank
//   if (world.rank() > 0) return workers.serve();
//   batch.take(workers.call("compute_log_prob", {.batch = batch}).batch);
//
// A method that fails on a rank is thrown there, and ends the run.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "models/distributed/mailbox.h"
#include "models/distributed/parallel_state.h"
#include "models/distributed/world.h"
#include "trainer/update/rollout_batch.h"
#include "trainer/update/rows_of_ranks.h"
#include "trainer/workers/row_parcels.h"

namespace ferry::trainer {

// A rank's part in a call. (verl: a mesh's registered dp_rank and is_collect.)
struct Dispatch {
  bool takes_part = true;
  bool whole = false;       // every rank gets all rows; the first one's answer is the result
  int dp_rank = 0;          // else: which of the parts
  bool is_collect = false;  // its answer is that part of the result

  static Dispatch none() { return {.takes_part = false}; }
};

// ONE_TO_ALL: the same for every rank.
Dispatch one_to_all(const models::World& world);
// RANK_ZERO: rank 0 alone.
Dispatch rank_zero(const models::World& world);
// DP_COMPUTE_PROTO: a part for every rank.
Dispatch dp_compute_proto(const models::World& world);
// MEGATRON_COMPUTE_PROTO: a part for each data parallel rank of a mesh; all ranks that share one
// compute it, and the first rank of its last stage answers.
Dispatch megatron_compute_proto(const models::ParallelState& mesh);

// A rank's messages in a call.
struct CallRoute {
  bool takes_part = false;
  int part = 0;                // its rows
  int rows_from = 0;           // the rank that sends them
  std::vector<int> rows_to{};  // the ranks that it hands them on to
  bool answers = false;        // with rows and numbers; the others say that they are done
};

// The routes of all ranks. A part leaves rank 0 once at most: the first other rank that has it
// hands it on, so that rank 0 sends a batch as often with large models as with small ones.
std::vector<CallRoute> route_call(std::span<const Dispatch> of_ranks);

// Arguments of a call with their rows, or its answer.
struct WorkerData {
  RolloutBatch batch{};
  nlohmann::json meta_info = nlohmann::json::object();
};

// The messages of calls, as rank 0 sees them.
struct MessageCost {
  double seconds = 0;      // of calls, but for those that the slowest rank's method took
  double work = 0;         // these seconds
  std::int64_t bytes = 0;  // that rank 0 sent and received
};

class WorkerGroup {
 public:
  using Method = std::function<WorkerData(const WorkerData&)>;

  // Called by all ranks. `worker_timeout`: after which the run ends if nobody calls or answers
  // while somebody waits for it.
  WorkerGroup(models::World& world, std::chrono::milliseconds worker_timeout);

  // Called by all ranks, in the same order. `method` may be empty where the rank takes no part.
  void add(std::string name, const Dispatch& dispatch, Method method);

  // A call under way.
  class Call {
    friend class WorkerGroup;
    std::string method_{};
    RowsOfRanks rows_{};                // none: every rank has the whole
    std::optional<WorkerData> mine_{};  // rank 0's answer
    std::int64_t answer_ = 0;           // its number
    bool own_rows_ = false;             // the answer's rows are not those of the call
    std::shared_ptr<const void> lease_{};
    double slowest_ = 0;  // seconds that a rank's method took
    MessageCost cost_{};
  };

  // On rank 0. `rows`: of each part; without: even_rows(). The rows of the answer, if there are
  // any, are in the order of the batch, and its columns of tokens are kept; its numbers are those
  // of the first part. Ranks that keep columns of the batch are in no other call. start() returns
  // when the others have been told, and rank 0's own part is done; ranks that are in a call cannot
  // be in another. `own_rows`: parts answer with rows of their own, one part's behind another's,
  // perhaps to no row.
  WorkerData call(const std::string& name, const WorkerData& data = {}, RowsOfRanks rows = {});
  Call start(const std::string& name,
             const WorkerData& data = {},
             RowsOfRanks rows = {},
             bool own_rows = false);
  WorkerData finish(Call call);
  // The number of parts into which a call's batch is cut; 0: all have the whole.
  int num_parts(const std::string& name) const;
  // The others return from serve().
  void stop();

  // On the others: does what it is told until stop().
  void serve();

  // Bytes that this rank has sent: calls, rows to those that compute them, and answers.
  std::int64_t bytes_sent() const { return bytes_sent_; }

  // On rank 0: of each method, since this was called last.
  std::map<std::string, MessageCost> take_costs() { return std::exchange(costs_, {}); }

 private:
  struct Registered {
    std::vector<CallRoute> routes{};  // on rank 0, as the next
    int num_parts = 0;
    Method method{};
  };

  const Registered& at(const std::string& name) const;
  std::vector<int> others() const;  // 1, 2, ...
  // Sends the rows that this rank keeps, and adds those that come to `rows`.
  void exchange_rows(std::span<const RowParcel> parcels,
                     RolloutBatch& rows,
                     const std::string& name);
  std::vector<std::int64_t> leased();

  models::World& world_;
  models::Mailbox mail_;
  std::map<std::string, Registered> methods_;
  KeptRows kept_;
  std::int64_t bytes_sent_ = 0, bytes_received_ = 0;
  std::int64_t last_answer_ = 0;  // on rank 0, as the next
  std::map<std::int64_t, std::weak_ptr<const void>> leases_;
  std::map<std::string, MessageCost> costs_;
};

}  // namespace ferry::trainer
