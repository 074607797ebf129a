// The needs of a run, before it begins: the bytes of each rank in each phase of a step, and the
// seconds of the phases. Formulas of configurations and shapes alone: neither a device nor weights
// are needed, and all ranks agree.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trainer/plan/memory_needs.h"
#include "trainer/plan/run_setup.h"

namespace ferry::trainer {

// Bytes of a rank, of all its roles, at the moment of a phase at which they are the most.
struct PhaseBytes {
  std::int64_t weights = 0;
  std::int64_t gradients = 0;
  std::int64_t optimizer = 0;
  std::int64_t kv_cache = 0;
  std::int64_t activations = 0;
  std::int64_t logits = 0;
  std::int64_t staging = 0;   // of messages
  std::int64_t context = 0;   // CUDA's and NCCL's own
  std::int64_t replicas = 0;  // other processes, all that they have
  std::int64_t host = 0;      // what rests there, pinned, and weights that replicas read

  std::int64_t on_device() const {
    return weights + gradients + optimizer + kv_cache + activations + logits + staging + context +
           replicas;
  }
};

struct PhasePlan {
  std::string name{};  // as the timeline calls it
  PhaseBytes bytes{};
};

// Ranks that have the same to do.
struct RankPlan {
  std::vector<int> ranks{};
  std::vector<std::string> parts{};  // "actor, stage 2 of 4"
  std::vector<PhasePlan> phases{};
};

struct PhaseSeconds {
  std::string name{};
  double seconds = 0;
};

struct RunPlan {
  std::int64_t memory = 0;  // of a device, that allocators can make use of
  std::vector<RankPlan> ranks{};
  // None where the run does not fit, or the device's rates are not known.
  std::vector<PhaseSeconds> seconds{};
  std::int64_t tokens = 0;  // of a step, all sequences of full length
  // A text for each phase that does not fit on some rank: what is missing, which settings would do.
  std::vector<std::string> misfits{};

  bool fits() const { return misfits.empty(); }
  double step_seconds() const;
  // Bytes of a part on a rank in the phase that has the most of it; 0 for a rank that the plan
  // lacks.
  std::int64_t most_bytes(int rank, std::int64_t PhaseBytes::*part) const;
};

RunPlan plan_run(const RunSetup& setup);

// Says so if a replica of the rollout is too large for a GPU: the run goes on without it.
std::optional<std::string> replica_misfit(const RunSetup& setup, const RunPlan& plan);

// Ranks that have the same part of each role, and those parts.
struct RankGroup {
  std::vector<int> ranks{};
  std::vector<std::optional<ModelOnRank>> models{};  // of setup.roles; nothing: no part in it
  std::optional<ModelOnRank> rollout{};
  // A replica's, where such a rank has replicas or shares its device with some.
  std::optional<ModelOnRank> replica{};
  bool has_replicas = false;
  int num_replicas_here = 0;  // on its device
};
std::vector<RankGroup> rank_groups(const RunSetup& setup);

// A phase of a step, and the role that computes in it.
struct Phase {
  enum class Work : std::uint8_t { kGenerate, kForward, kLearn, kStep, kReshard, kSave };
  std::string name{};
  Work work = Work::kForward;
  std::size_t role = 0;  // of setup.roles
};
std::vector<Phase> phases_of(const RunSetup& setup);

// The bytes of a rank in a phase, and those without what its micro-batches take.
PhaseBytes bytes_of(const RunSetup& setup, const RankGroup& group, const Phase& phase);
PhaseBytes resting_bytes(const RunSetup& setup, const RankGroup& group, const Phase& phase);
// The largest micro-batches of a role, learned from or not.
BatchBytes largest_batch(const RoleSetup& role, const ModelOnRank& model, bool forward_only);
// The memory that generation shares out between a step and its cache.
struct RolloutRoom {
  std::int64_t free = 0;     // when the cache is made
  std::int64_t step = 0;     // that a step of it needs
  std::int64_t reserve = 0;  // of `free`, for messages and what allocators lose
  std::int64_t useful = 0;   // of a cache for as many sequences as a step has
};
RolloutRoom rollout_room(const RunSetup& setup, const RankGroup& group);

}  // namespace ferry::trainer
