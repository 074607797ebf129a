#include "distckpt/formats/archive/hdf5_file.h"

#include <algorithm>
#include <string>

#include "distckpt/base/error.h"

namespace ferry::distckpt {
namespace {

std::recursive_mutex& hdf5_mutex() {
  static std::recursive_mutex mutex;  // of libhdf5's global state
  return mutex;
}

// The innermost of libhdf5's messages is the one that says what is wrong.
std::string last_message() {
  std::string message;
  H5Ewalk2(
      H5E_DEFAULT, H5E_WALK_UPWARD,
      [](unsigned depth, const H5E_error2_t* error, void* into) -> herr_t {
        if (depth == 0 && error->desc != nullptr) *static_cast<std::string*>(into) = error->desc;
        return 0;
      },
      &message);
  H5Eclear2(H5E_DEFAULT);
  return message.empty() ? "refused" : message;
}

Hdf5Handle file_access() {
  auto access = own_hdf5(H5Pcreate(H5P_FILE_ACCESS), "HDF5");
  // Files of 1.10: with checksums in all structures, and read by every later release.
  check_hdf5(H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_V110), "HDF5");
  // A working folder has its own lock, and read-only file systems may have none.
  check_hdf5(H5Pset_file_locking(access.get(), false, true), "HDF5");
  return access;
}

}  // namespace

Hdf5Lock::Hdf5Lock() : lock_(hdf5_mutex()) {
  H5dont_atexit();  // a file that could not be closed would be tried again without end
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

Hdf5Handle::~Hdf5Handle() {
  if (id_ < 0) return;
  const Hdf5Lock lock;
  switch (H5Iget_type(id_)) {
    case H5I_FILE:
      H5Fclose(id_);
      break;
    case H5I_GROUP:
      H5Gclose(id_);
      break;
    case H5I_DATATYPE:
      H5Tclose(id_);
      break;
    case H5I_DATASPACE:
      H5Sclose(id_);
      break;
    case H5I_DATASET:
      H5Dclose(id_);
      break;
    case H5I_ATTR:
      H5Aclose(id_);
      break;
    default:
      H5Pclose(id_);
  }
}

void check_hdf5(std::int64_t result, std::string_view what) {
  require_hdf5_memory();
  if (result >= 0) return;
  fail(ErrorKind::kIo, "{}: libhdf5: {}", what, last_message());
}

Hdf5Handle own_hdf5(hid_t id, std::string_view what) {
  Hdf5Handle handle(id);
  check_hdf5(id, what);
  return handle;
}

Hdf5Handle create_hdf5(const std::filesystem::path& path, std::int64_t metadata_block) {
  const auto access = file_access();
  check_hdf5(H5Pset_meta_block_size(access.get(), static_cast<hsize_t>(metadata_block)), "HDF5");
  // No times: the same weights give the same file.
  const auto create = own_hdf5(H5Pcreate(H5P_FILE_CREATE), "HDF5");
  check_hdf5(H5Pset_obj_track_times(create.get(), false), "HDF5");
  return own_hdf5(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, create.get(), access.get()),
                  path.string());
}

void close_hdf5(Hdf5Handle file, const std::filesystem::path& path) {
  check_hdf5(H5Fflush(file.get(), H5F_SCOPE_GLOBAL), path.string());
  check_hdf5(H5Fclose(file.release()), path.string());
}

void write_attribute(const Hdf5Handle& object, const char* name, std::string_view text) {
  const auto type = own_hdf5(H5Tcopy(H5T_C_S1), name);
  check_hdf5(H5Tset_size(type.get(), text.empty() ? 1 : text.size()), name);
  check_hdf5(H5Tset_strpad(type.get(), H5T_STR_NULLPAD), name);
  check_hdf5(H5Tset_cset(type.get(), H5T_CSET_UTF8), name);
  const auto space = own_hdf5(H5Screate(H5S_SCALAR), name);
  const auto attribute = own_hdf5(
      H5Acreate2(object.get(), name, type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), name);
  const std::string bytes = text.empty() ? std::string(1, '\0') : std::string(text);
  check_hdf5(H5Awrite(attribute.get(), type.get(), bytes.data()), name);
}

Hdf5Handle create_group(const Hdf5Handle& parent, const std::string& name) {
  const auto create = own_hdf5(H5Pcreate(H5P_GROUP_CREATE), name);
  check_hdf5(H5Pset_obj_track_times(create.get(), false), name);
  return own_hdf5(H5Gcreate2(parent.get(), name.c_str(), H5P_DEFAULT, create.get(), H5P_DEFAULT),
                  name);
}

std::int64_t write_bytes_dataset(const Hdf5Handle& group,
                                 const std::string& name,
                                 std::string_view bytes) {
  const auto size = static_cast<hsize_t>(bytes.size());
  const auto space = own_hdf5(H5Screate_simple(1, &size, nullptr), name);
  const auto create = own_hdf5(H5Pcreate(H5P_DATASET_CREATE), name);
  check_hdf5(H5Pset_obj_track_times(create.get(), false), name);
  const auto dataset = own_hdf5(H5Dcreate2(group.get(), name.c_str(), H5T_STD_U8LE, space.get(),
                                           H5P_DEFAULT, create.get(), H5P_DEFAULT),
                                name);
  if (bytes.empty()) return 0;
  check_hdf5(H5Dwrite(dataset.get(), H5T_NATIVE_UINT8, H5S_ALL, H5S_ALL, H5P_DEFAULT, bytes.data()),
             name);
  const auto begin = H5Dget_offset(dataset.get());
  require(begin != HADDR_UNDEF, ErrorKind::kIo, "{}: libhdf5 does not say where it lies", name);
  return static_cast<std::int64_t>(begin);
}

std::array<hsize_t, kMaxRank> hdf5_dims(const Dims& dims) {
  std::array<hsize_t, kMaxRank> result{};
  std::ranges::copy(dims, result.begin());
  return result;
}

}  // namespace ferry::distckpt
