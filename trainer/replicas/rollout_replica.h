// A process that answers beside a rank of the rollout (replica_fleet.h): it loads the model of the
// run's configuration, takes weights and sessions from the rank, and gives sessions back.
#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>

namespace ferry::trainer {

// `socket`: RUN/replicas/rank<R>.sock. `slot`: of one that the rank has started. `gpu`: of this
// machine, that it computes on if the run is on GPUs; not set: the first. Returns when the rank has
// gone. Throws Error, of which the rank is told.
void run_replica(const std::filesystem::path& socket,
                 std::optional<std::size_t> slot,
                 std::optional<int> gpu);

}  // namespace ferry::trainer
