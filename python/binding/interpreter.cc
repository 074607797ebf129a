#include "python/binding/interpreter.h"

#include "cli/report/json.h"

namespace ferry::python {

converter::ProgressFunction reporter(PyObject* callback, WithoutGil& gil) {
  return [callback, &gil](const converter::Progress& progress) {
    return gil.with_gil([&] {
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
  if (PyErr_Occurred() != nullptr) return;
  const Reference module(PyImport_ImportModule("ferry._errors"));
  if (!module) return;
  const auto json = cli::json_text(cli::error_json(error), -1);
  const Reference made(PyObject_CallMethod(module.get(), "from_json", "s", json.c_str()));
  if (!made) return;
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(made.get())), made.get());
}

}  // namespace ferry::python
