#include "models/nccl_backend.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "models/world.h"

namespace ferry::models {

c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                            int rank,
                                            int size,
                                            const World& world) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = world.timeout();
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(
      c10::make_intrusive<c10d::PrefixStore>("nccl", store), rank, size, options);
}

void end_nccl(c10d::Backend& backend) {
  dynamic_cast<c10d::ProcessGroupNCCL&>(backend).shutdown();
}

}  // namespace ferry::models
