// NCCL communicators, in builds with CUDA. In a build for the host alone make_nccl() throws.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "distckpt/base/error.h"

namespace c10d {
class Backend;
class Store;
class Work;
}  // namespace c10d

namespace ferry::models {

class World;

// A communicator of `size` ranks on the world's device. Throws Error(kDevice) without CUDA.
c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                            int rank,
                                            int size,
                                            const World& world);

// The run that a communicator belongs to, as watch_nccl() needs it.
struct WatchedRun {
  std::chrono::milliseconds timeout{};
  std::function<bool()> has_failed{};              // on another rank
  std::function<void(const Error&)> last_words{};  // called before the process ends
};

// Watches `work` from another thread. A kernel that waits for a rank that has died never ends, and
// cannot be stopped. If the work is not done within the timeout, fails, or still waits some seconds
// after another rank has failed, the process prints the Error that `failure` makes of the reason
// and ends with status 2.
void watch_nccl(c10::intrusive_ptr<c10d::Work> work,
                std::shared_ptr<const WatchedRun> run,
                std::function<Error(const std::string& why)> failure);

// Shuts down a communicator of make_nccl(), once no work waits on it. A process that exits without
// this call breaks the communicators of its peers.
void end_nccl(c10d::Backend& backend);

}  // namespace ferry::models
