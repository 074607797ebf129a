// The interpreter beside C++: its lock, its exceptions, its objects. The module is of the stable
// ABI of Python 3.9, so that one file serves that version and every later one.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "converter/progress.h"
#include "distckpt/base/foreign_error.h"

namespace ferry::python {

// A reference that this owns.
struct Release {
  void operator()(PyObject* object) const { Py_DecRef(object); }
};
using Reference = std::unique_ptr<PyObject, Release>;

// A Python exception is set: unwinds to guarded().
class PythonError : public std::exception {
 public:
  const char* what() const noexcept override { return "a Python exception"; }
};

inline PyObject* checked(PyObject* object) {
  if (object == nullptr) throw PythonError();
  return object;
}

// The thread of Python that called, which has given the lock away.
class Caller {
 public:
  virtual ~Caller() = default;
  // Runs `body`, which must not throw, in that thread, with the lock.
  virtual bool with_gil(const std::function<bool()>& body) = 0;
};

// Lets other threads of Python run while it lives.
class WithoutGil final : public Caller {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() override;
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

  // Called by the thread that made this.
  bool with_gil(const std::function<bool()>& body) override;

 private:
  void restore();

  PyThreadState* state_;
};

// Work that may wait long before it tells of any progress. It runs in a thread of its own, while
// the one that called looks for signals: a Python exception, such as KeyboardInterrupt, interrupts
// it (distckpt/base/interruption.h).
class Work final : public Caller {
 public:
  // Returns when `body` has, and throws what it throws.
  void run(const std::function<void()>& body);

  // Called by the thread of `body`.
  bool with_gil(const std::function<bool()>& body) override;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<bool()>* asked_ = nullptr;  // to be run by the caller
  bool answer_ = false;
  bool done_ = false;
  std::atomic<bool> interrupted_ = false;
};

// Calls callback(stage, bytes done, bytes total, finished), unless that is None, and looks for
// signals. Stops where it raises or returns False; the exception is set when the lock is held
// again.
converter::ProgressFunction reporter(PyObject* callback, Caller& caller);

// Sets the Python exception of an Error, unless one is set already: ferry._errors.Error.
void set_exception(const Error& error);

// Runs `body`, which returns a new reference, and turns C++ exceptions into Python's.
template <typename Body>
PyObject* guarded(Body&& body) noexcept {
  try {
    Reference result(checked(body()));
    if (PyErr_Occurred() != nullptr) return nullptr;  // a callback's, after all was done
    return result.release();
  } catch (const PythonError&) {
  } catch (const std::exception& error) {
    set_exception(as_error(error));
  }
  return nullptr;
}

// Objects of C++ in the hands of Python.
template <typename T>
PyObject* wrap(std::shared_ptr<T> object, const char* kind) {
  auto* const held = new std::shared_ptr<T>(std::move(object));
  auto* const capsule = PyCapsule_New(held, kind, [](PyObject* dying) {
    auto* const name = PyCapsule_GetName(dying);
    delete static_cast<std::shared_ptr<T>*>(PyCapsule_GetPointer(dying, name));
  });
  if (capsule == nullptr) delete held;
  return checked(capsule);
}

template <typename T>
std::shared_ptr<T> unwrap(PyObject* capsule, const char* kind) {
  auto* const held = static_cast<std::shared_ptr<T>*>(PyCapsule_GetPointer(capsule, kind));
  if (held == nullptr) throw PythonError();
  return *held;
}

inline PyObject* text(const std::string& string) {
  return PyUnicode_FromStringAndSize(string.data(), static_cast<Py_ssize_t>(string.size()));
}

// The functions of the module.
PyObject* let_interpreter_end(PyObject* self, PyObject* arguments);  // interpreter.cc
PyObject* report(PyObject* self, PyObject* arguments);               // reports.cc
PyObject* open_checkpoint(PyObject* self, PyObject* arguments);      // streams.cc
PyObject* describe(PyObject* self, PyObject* arguments);
PyObject* carried_file(PyObject* self, PyObject* arguments);
PyObject* write_run_config(PyObject* self, PyObject* arguments);
PyObject* stream(PyObject* self, PyObject* arguments);
PyObject* stream_tensors(PyObject* self, PyObject* arguments);
PyObject* stream_next(PyObject* self, PyObject* arguments);
PyObject* stream_start(PyObject* self, PyObject* arguments);
PyObject* stream_wait(PyObject* self, PyObject* arguments);
PyObject* stream_release(PyObject* self, PyObject* arguments);
PyObject* stream_close(PyObject* self, PyObject* arguments);
PyObject* allocate(PyObject* self, PyObject* arguments);  // memory.cc
PyObject* export_dlpack(PyObject* self, PyObject* arguments);
PyObject* import_dlpack(PyObject* self, PyObject* arguments);
PyObject* load_shards(PyObject* self, PyObject* arguments);  // shards.cc
PyObject* save_shards(PyObject* self, PyObject* arguments);
PyObject* save_tensors(PyObject* self, PyObject* arguments);

}  // namespace ferry::python
