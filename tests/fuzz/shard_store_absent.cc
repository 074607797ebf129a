#include "tests/fuzz/targets.h"

namespace ferry::fuzz {

// Without HDF5 there is no archive to read.
void shard_store(std::string_view) {}

}  // namespace ferry::fuzz
