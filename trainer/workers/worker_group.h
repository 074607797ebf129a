// The ranks of a run as workers that rank 0 calls (verl single_controller): rank 0 runs the
// algorithm and has the batch, the others serve. A method is registered under its name with a
// dispatch, which says for each rank which part of the batch is its own, and whose answers make up
// the result. What is called, and its batch on the host, goes over Gloo between rank 0 and each
// rank that takes part; tensors of models never do.
//
//   workers.add("compute_log_prob", megatron_compute_proto(mesh), compute_log_prob);  // every rank
//   if (world.rank() > 0) return workers.serve();
//   batch = batch.union_with(workers.call("compute_log_prob", batch));
//
// A method that fails on a rank is thrown there, and ends the run.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/distributed/mailbox.h"
#include "models/distributed/parallel_state.h"
#include "models/distributed/world.h"
#include "trainer/update/data_proto.h"

namespace ferry::trainer {

// What a rank has of a call. (verl: a mesh's registered dp_rank and is_collect.)
struct Dispatch {
  bool takes_part = true;
  bool whole = false;       // all of the batch goes to every rank
  int dp_rank = 0;          // else: which part of it
  bool is_collect = false;  // its answer is that part of the result

  static Dispatch none() { return {.takes_part = false}; }
};

// ONE_TO_ALL: the same for every rank; the answer is rank 0's, or the first rank's that takes part.
Dispatch one_to_all(const models::World& world);
// RANK_ZERO: rank 0 alone.
Dispatch rank_zero(const models::World& world);
// DP_COMPUTE_PROTO: a part for every rank.
Dispatch dp_compute_proto(const models::World& world);
// MEGATRON_COMPUTE_PROTO: a part for each data parallel rank of a mesh; all ranks that share one
// compute it, and its last stage's first answers.
Dispatch megatron_compute_proto(const models::ParallelState& mesh);

class WorkerGroup {
 public:
  using Method = std::function<DataProto(const DataProto&)>;

  // Called by all ranks. `worker_timeout`: after which the run ends if nobody calls or answers
  // while somebody waits for it.
  WorkerGroup(models::World& world, std::chrono::milliseconds worker_timeout);

  // Called by all ranks, in the same order. `method` may be empty where the rank takes no part.
  void add(std::string name, const Dispatch& dispatch, Method method);

  // A call under way.
  class Call {
    friend class WorkerGroup;
    std::string method_{};
    std::int64_t pad_ = 0;
    std::optional<DataProto> mine_{};  // rank 0's answer
  };

  // On rank 0. Where parts have to be equal, first rows are repeated behind the last and their
  // answers dropped. start() returns when the others have been told, and rank 0's own part is done;
  // ranks that are in a call cannot be in another.
  DataProto call(const std::string& name, const DataProto& data = DataProto());
  Call start(const std::string& name, const DataProto& data = DataProto());
  DataProto finish(Call call);
  // Into how many parts the batch of a call is cut; 0: all have the whole.
  int num_parts(const std::string& name) const;
  // The others return from serve().
  void stop();

  // On the others: does what it is told until stop().
  void serve();

 private:
  struct Registered {
    std::vector<Dispatch> of_ranks{};  // on rank 0
    Method method{};
  };

  const Registered& at(const std::string& name) const;

  models::World& world_;
  models::Mailbox mail_;
  std::map<std::string, Registered> methods_;
};

}  // namespace ferry::trainer
