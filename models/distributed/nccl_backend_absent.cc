#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "models/distributed/nccl_backend.h"
#include "models/distributed/world.h"

namespace ferry::models {

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>&,
                                            int,
                                            int,
                                            const World&) {
  throw Error(ErrorKind::kDevice, "this build has no NCCL", "configure with -Dcuda=enabled");
}

void watch_nccl(c10::intrusive_ptr<c10d::Work>,
                std::shared_ptr<const WatchedRun>,
                std::function<Error(const std::string&)>) {}

void end_nccl(c10d::Backend&) {}

}  // namespace ferry::models
