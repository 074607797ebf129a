// Gloo: groups of ranks on the host.
#pragma once

#include <c10/util/intrusive_ptr.h>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace ferry::models {

class World;

// A Gloo backend for rank `rank` of `size`, which meet in the store, with the world's timeout. It
// uses the network interface that GLOO_SOCKET_IFNAME names.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                            int rank,
                                            int size,
                                            const World& world);

}  // namespace ferry::models
