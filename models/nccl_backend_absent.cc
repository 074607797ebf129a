#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "distckpt/error.h"
#include "models/nccl_backend.h"
#include "models/world.h"

namespace ferry::models {

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>&,
                                            int,
                                            int,
                                            const World&) {
  throw Error(ErrorKind::kDevice, "this build has no NCCL", "configure with -Dcuda=enabled");
}

void end_nccl(c10d::Backend&) {}

}  // namespace ferry::models
