#include "python/binding/interpreter.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "cli/report/json.h"
#include "distckpt/base/interruption.h"

namespace ferry::python {

namespace {

// The end of the interpreter. Before 3.14 Python unwinds a thread that asks for the lock then
// (pthread_exit), which frames of C++ do not survive. Such threads wait for the end of the process
// instead, as they do in later versions.
struct Ending {
  std::atomic<bool> begun = false;
  std::atomic<std::thread::id> thread{};  // that ends it
  std::atomic<int> asking = 0;            // threads that ask for the lock, or call back with it
};
Ending ending;

// Code of Python beneath frames of C++, which the end waits for.
struct Beneath {
  Beneath() { ++ending.asking; }
  ~Beneath() { --ending.asking; }
};

// False in versions that do not say so.
bool is_finalizing() {
  static const auto asked = [] {
    void* found = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    if (found == nullptr) found = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
    return reinterpret_cast<int (*)()>(found);
  }();
  return asked != nullptr && asked() != 0;
}

// Stays here once the interpreter is being torn down. Until then functions that atexit calls later
// may wait for this thread, which goes on if nothing has happened in a tenth of a second.
void let_it_end() {
  constexpr int kMostLooks = 100;
  for (int i = 0; i < kMostLooks; ++i) {
    while (is_finalizing()) pause();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

PyObject* let_interpreter_end(PyObject* /*self*/, PyObject* /*arguments*/) {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0) {  // the main one
    constexpr int kMostLooks = 1000;
    ending.thread = std::this_thread::get_id();
    ending.begun = true;
    auto* const state = PyEval_SaveThread();
    for (int i = 0; i < kMostLooks && ending.asking > 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    PyEval_RestoreThread(state);
  }
  Py_IncRef(Py_None);
  return Py_None;
}

void WithoutGil::restore() {
  ++ending.asking;
  if (ending.begun && ending.thread.load() != std::this_thread::get_id()) {
    --ending.asking;
    let_it_end();
    ++ending.asking;
  }
  PyEval_RestoreThread(state_);
}

WithoutGil::~WithoutGil() {
  restore();
  --ending.asking;
}

bool WithoutGil::with_gil(const std::function<bool()>& body) {
  restore();
  const bool result = body();
  state_ = PyEval_SaveThread();
  --ending.asking;
  return result;
}

void Work::run(const std::function<void()>& body) {
  constexpr std::chrono::milliseconds kLook{100};
  std::exception_ptr failure;
  WithoutGil gil;
  std::jthread thread([&] {
    const distckpt::InterruptedBy caller([&] { return interrupted_.load(); });
    try {
      body();
    } catch (...) {
      failure = std::current_exception();
    }
    const std::lock_guard lock(mutex_);
    done_ = true;
    changed_.notify_all();
  });
  std::unique_lock lock(mutex_);
  while (!done_) {
    changed_.wait_for(lock, kLook, [&] { return done_ || asked_ != nullptr; });
    if (done_) break;
    const auto* const asked = asked_;
    lock.unlock();
    const bool answer = gil.with_gil([&] {
      if (asked != nullptr) return (*asked)();
      return PyErr_Occurred() == nullptr && PyErr_CheckSignals() == 0;
    });
    if (!answer) interrupted_ = true;
    lock.lock();
    if (asked == nullptr) continue;
    answer_ = answer;
    asked_ = nullptr;
    changed_.notify_all();
  }
  lock.unlock();
  thread.join();
  if (failure) std::rethrow_exception(failure);
}

bool Work::with_gil(const std::function<bool()>& body) {
  std::unique_lock lock(mutex_);
  asked_ = &body;
  changed_.notify_all();
  changed_.wait(lock, [&] { return asked_ == nullptr; });
  return answer_;
}

converter::ProgressFunction reporter(PyObject* callback, Caller& caller) {
  return [callback, &caller](const converter::Progress& progress) {
    return caller.with_gil([&] {
      if (PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0) return false;
      if (callback == Py_None) return true;
      const std::string stage(progress.stage);
      const Reference result(PyObject_CallFunction(
          callback, "sLLO", stage.c_str(), static_cast<long long>(progress.bytes_done),
          static_cast<long long>(progress.bytes_total), progress.finished ? Py_True : Py_False));
      return result && result.get() != Py_False;
    });
  };
}

void set_exception(const Error& error) {
  const Beneath here;
  if (PyErr_Occurred() != nullptr) return;
  const Reference module(PyImport_ImportModule("ferry._errors"));
  if (!module) return;
  const auto json = cli::json_text(cli::error_json(error), -1);
  const Reference made(PyObject_CallMethod(module.get(), "from_json", "s", json.c_str()));
  if (!made) return;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.get())), made.get());
}

}  // namespace ferry::python
