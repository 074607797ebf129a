// libhdf5 as this program uses it, to write: handles that close themselves, results that throw.
// libhdf5 keeps global state and is not thread-safe: hold a Hdf5Lock around every use. It never
// reads a file that this process has not just written.
#pragma once

#include <hdf5.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "distckpt/base/box.h"
#include "distckpt/formats/archive/hdf5_memory.h"

namespace ferry::distckpt {

// Also turns libhdf5's own error messages off: they are taken over into ours.
class Hdf5Lock {
 public:
  Hdf5Lock();

 private:
  std::unique_lock<std::recursive_mutex> lock_;
  Hdf5Memory memory_{};
};

// An identifier of libhdf5: file, group, dataset, type, space, attribute or property list.
class Hdf5Handle {
 public:
  Hdf5Handle() = default;
  explicit Hdf5Handle(hid_t id) : id_(id) {}
  Hdf5Handle(Hdf5Handle&& other) noexcept : id_(std::exchange(other.id_, -1)) {}
  Hdf5Handle& operator=(Hdf5Handle&& other) noexcept {
    std::swap(id_, other.id_);
    return *this;
  }
  ~Hdf5Handle();

  hid_t get() const { return id_; }
  hid_t release() { return std::exchange(id_, -1); }

 private:
  hid_t id_ = -1;
};

// Throws Error(kIo) "<what>: libhdf5: ..." if `result` is negative, std::bad_alloc if libhdf5 has
// run out of memory.
void check_hdf5(std::int64_t result, std::string_view what);
Hdf5Handle own_hdf5(hid_t id, std::string_view what);

// `metadata_block` bytes of HDF5's own structures lie together.
Hdf5Handle create_hdf5(const std::filesystem::path& path, std::int64_t metadata_block);

// Flushes and closes a file of which no other handle is open. Throws Error(kIo).
void close_hdf5(Hdf5Handle file, const std::filesystem::path& path);

void write_attribute(const Hdf5Handle& object, const char* name, std::string_view text);

Hdf5Handle create_group(const Hdf5Handle& parent, const std::string& name);

// A dataset of bytes, in one piece; where it begins in the file, 0 if it is empty.
std::int64_t write_bytes_dataset(const Hdf5Handle& group,
                                 const std::string& name,
                                 std::string_view bytes);

std::array<hsize_t, kMaxRank> hdf5_dims(const Dims& dims);

}  // namespace ferry::distckpt
