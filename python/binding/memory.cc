// Memory of tensors, handed over and taken in by DLPack (github.com/dmlc/dlpack, dlpack.h 1.0).
#include <cstdint>
#include <cstdlib>
#include <new>
#include <string_view>
#include <vector>

#include "distckpt/base/dtype.h"
#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "python/binding/interpreter.h"

namespace ferry::python {
namespace {

constexpr const char* kMemory = "ferry.memory";
constexpr std::size_t kAlignment = 64;

struct DLDevice {
  std::int32_t type = 1;  // kDLCPU
  std::int32_t id = 0;
};
struct DLDataType {
  std::uint8_t code = 0;
  std::uint8_t bits = 0;
  std::uint16_t lanes = 1;
};
struct DLTensor {
  void* data = nullptr;
  DLDevice device{};
  std::int32_t ndim = 0;
  DLDataType dtype{};
  std::int64_t* shape = nullptr;
  std::int64_t* strides = nullptr;
  std::uint64_t byte_offset = 0;
};
struct DLManagedTensor {
  DLTensor tensor{};
  void* context = nullptr;
  void (*deleter)(DLManagedTensor*) = nullptr;
};
struct DLManagedTensorVersioned {
  std::uint32_t major = 1;
  std::uint32_t minor = 0;
  void* context = nullptr;
  void (*deleter)(DLManagedTensorVersioned*) = nullptr;
  std::uint64_t flags = 0;
  DLTensor tensor{};
};

constexpr std::uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6, kFloat8E4M3 = 10,
                       kFloat8E5M2 = 12, kFloat8E8M0 = 14;

DLDataType dlpack_dtype(distckpt::DType dtype) {
  using distckpt::DType;
  const auto bits = static_cast<std::uint8_t>(8 * size_of(dtype));
  switch (dtype) {
    case DType::kBool:
      return {kBool, bits};
    case DType::kU8:
      return {kUInt, bits};
    case DType::kI8:
    case DType::kI16:
    case DType::kI32:
    case DType::kI64:
      return {kInt, bits};
    case DType::kF8E4M3:
      return {kFloat8E4M3, bits};
    case DType::kF8E5M2:
      return {kFloat8E5M2, bits};
    case DType::kF8E8M0:
      return {kFloat8E8M0, bits};
    case DType::kBF16:
      return {kBFloat, bits};
    default:
      return {kFloat, bits};
  }
}

// A tensor that is out, with all that it points at.
template <typename Managed>
struct Exported {
  Managed managed{};
  std::shared_ptr<std::byte> memory{};
  std::vector<std::int64_t> shape{};
  std::vector<std::int64_t> strides{};
};

template <typename Managed>
PyObject* export_as(const char* name,
                    const std::shared_ptr<std::byte>& memory,
                    distckpt::DType dtype,
                    const std::vector<std::int64_t>& shape,
                    std::uint64_t flags) {
  auto out = std::make_unique<Exported<Managed>>();
  out->memory = memory;
  out->shape = shape;
  out->strides.assign(out->shape.size(), 1);
  for (std::size_t d = out->shape.size(); d-- > 1;)
    out->strides[d - 1] = out->strides[d] * out->shape[d];
  out->managed.tensor = {.data = out->memory.get(),
                         .ndim = static_cast<std::int32_t>(out->shape.size()),
                         .dtype = dlpack_dtype(dtype),
                         .shape = out->shape.data(),
                         .strides = out->strides.data()};
  if constexpr (requires { out->managed.flags; }) out->managed.flags = flags;
  out->managed.context = out.get();
  out->managed.deleter = [](Managed* managed) {
    delete static_cast<Exported<Managed>*>(managed->context);
  };
  // A consumer renames the capsule and calls the deleter; else that is left to the capsule.
  auto* const capsule = PyCapsule_New(&out->managed, name, [](PyObject* dying) {
    const std::string_view now(PyCapsule_GetName(dying));
    if (now.starts_with("used_")) return;
    auto* const managed = static_cast<Managed*>(PyCapsule_GetPointer(dying, now.data()));
    managed->deleter(managed);
  });
  if (capsule == nullptr) throw PythonError();
  (void)out.release();
  return capsule;
}

PyObject* list_of(const std::int64_t* values, std::int32_t count) {
  Reference list(checked(PyList_New(count)));
  for (std::int32_t i = 0; i < count; ++i)
    PyList_SetItem(list.get(), i, checked(PyLong_FromLongLong(values[i])));
  return list.release();
}

}  // namespace

// allocate(bytes) -> (capsule that owns them, address)
PyObject* allocate(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    Py_ssize_t bytes = 0;
    if (PyArg_ParseTuple(arguments, "n", &bytes) == 0) throw PythonError();
    const auto whole = distckpt::round_up(static_cast<std::size_t>(bytes) + 1, kAlignment);
    auto* const data = static_cast<std::byte*>(std::aligned_alloc(kAlignment, whole));
    if (data == nullptr) throw std::bad_alloc();
    const std::shared_ptr<std::byte> memory(data, [](std::byte* begin) { std::free(begin); });
    const Reference owner(wrap(memory, kMemory));
    return Py_BuildValue("OK", owner.get(),
                         static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(data)));
  });
}

// export_dlpack(memory, dtype, shape, versioned, copied) -> capsule
PyObject* export_dlpack(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject* owner = nullptr;
    PyObject* sizes = nullptr;
    const char* dtype_name = nullptr;
    int versioned = 0;
    int copied = 0;
    if (PyArg_ParseTuple(arguments, "OsOpp", &owner, &dtype_name, &sizes, &versioned, &copied) == 0)
      throw PythonError();
    const auto dtype = distckpt::dtype_from_short_name(dtype_name);
    require(dtype.has_value(), ErrorKind::kBug, "{}: no dtype", dtype_name);
    std::vector<std::int64_t> shape;
    for (Py_ssize_t i = 0; i < PySequence_Size(sizes); ++i) {
      const Reference size(checked(PySequence_GetItem(sizes, i)));
      shape.push_back(PyLong_AsLongLong(size.get()));
    }
    const auto memory = unwrap<std::byte>(owner, kMemory);
    constexpr std::uint64_t kIsCopied = 2;
    const auto flags = copied != 0 ? kIsCopied : 0;
    if (versioned != 0) {
      return export_as<DLManagedTensorVersioned>("dltensor_versioned", memory, *dtype, shape,
                                                 flags);
    }
    return export_as<DLManagedTensor>("dltensor", memory, *dtype, shape, flags);
  });
}

// import_dlpack(capsule) -> (address, device type, dtype code, bits, shape, strides or None,
// read-only). The capsule is not used up: it, and what it came from, must outlive the address.
PyObject* import_dlpack(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject* capsule = nullptr;
    if (PyArg_ParseTuple(arguments, "O", &capsule) == 0) throw PythonError();
    const bool versioned = PyCapsule_IsValid(capsule, "dltensor_versioned") != 0;
    auto* const pointer =
        PyCapsule_GetPointer(capsule, versioned ? "dltensor_versioned" : "dltensor");
    if (pointer == nullptr) throw PythonError();
    const auto& tensor = versioned ? static_cast<DLManagedTensorVersioned*>(pointer)->tensor
                                   : static_cast<DLManagedTensor*>(pointer)->tensor;
    const bool read_only =
        versioned && (static_cast<DLManagedTensorVersioned*>(pointer)->flags & 1) != 0;
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
    const Reference shape(list_of(tensor.shape, tensor.ndim));
    Py_IncRef(Py_None);
    Reference strides(Py_None);
    if (tensor.strides != nullptr) strides.reset(list_of(tensor.strides, tensor.ndim));
    return Py_BuildValue("KiiiOOO", static_cast<unsigned long long>(address), tensor.device.type,
                         static_cast<int>(tensor.dtype.code), static_cast<int>(tensor.dtype.bits),
                         shape.get(), strides.get(), read_only ? Py_True : Py_False);
  });
}

}  // namespace ferry::python
