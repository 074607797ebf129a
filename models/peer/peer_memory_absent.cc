#include "models/peer/peer_memory.h"

namespace ferry::models {

std::unique_ptr<PeerMemory> PeerMemory::make(int, int, at::Device, const Gather&) {
  return nullptr;
}

}  // namespace ferry::models
