// The capsule that holds an opened checkpoint.
#pragma once

namespace ferry::python {

inline constexpr const char* kCheckpoint = "ferry.checkpoint";  // shared_ptr<const Checkpoint>

}  // namespace ferry::python
