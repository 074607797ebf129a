// A parsed pickle written anew: what a checkpoint's common state holds and nobody here changes goes
// through unread.
#pragma once

#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/formats/torch_save/pickle_writer.h"

namespace ferry::distckpt {

// Emits a value that Python would build equal: objects as calls of their class, or instances with
// their attributes. Values that are shared are repeated. Throws Error(kCorrupt) for what no common
// state holds: persistent ids, bytes, integers beyond 64 bits, or more than a million values.
void write_value(PickleWriter& pickle, PickleValue value);

}  // namespace ferry::distckpt
