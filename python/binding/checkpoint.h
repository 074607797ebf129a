// The capsule that holds an opened checkpoint.
#pragma once

#include <memory>

#include "converter/bridge/checkpoint_parts.h"
#include "python/binding/interpreter.h"

namespace ferry::python {

inline constexpr const char* kCheckpoint = "ferry.checkpoint";  // shared_ptr<CheckpointParts>

inline std::shared_ptr<const converter::Checkpoint> checkpoint_of(PyObject* capsule) {
  return unwrap<const converter::CheckpointParts>(capsule, kCheckpoint)->whole();
}

}  // namespace ferry::python
