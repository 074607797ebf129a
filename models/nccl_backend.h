// NCCL, in builds that have it. A build for the host alone refuses.
#pragma once

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace ferry::models {

class World;

// A communicator of `size` ranks on the world's device. Throws Error(kDevice) without CUDA.
c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                            int rank,
                                            int size,
                                            const World& world);

// Ends what make_nccl() made, once nobody waits for it: a process that just exits breaks its peers.
void end_nccl(c10d::Backend& backend);

}  // namespace ferry::models
