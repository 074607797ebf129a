// Memory for libhdf5, which crashes at most places where malloc gives it none. Programs are linked
// such that malloc, calloc, realloc, strdup and free of all static code, libhdf5's too, are the
// functions of hdf5_memory.cc (-Wl,--wrap). Nothing helps a libhdf5 that is linked dynamically.
#pragma once

namespace ferry::distckpt {

// While one lives, its thread's mallocs in static code fall back to a reserve of a few MiB, which
// is more than a call of libhdf5 needs. One at a time, of whichever thread.
class Hdf5Memory {
 public:
  Hdf5Memory();  // Throws std::bad_alloc if there is no room for the reserve.
  Hdf5Memory(const Hdf5Memory&) = delete;
  Hdf5Memory& operator=(const Hdf5Memory&) = delete;
  ~Hdf5Memory();
};

// Throws std::bad_alloc from the first use of the reserve on: libhdf5 must not be asked for more
// than to close what is open.
void require_hdf5_memory();

}  // namespace ferry::distckpt
