// The module ferry._ferry: what the package ferry is made of. Its functions take and give JSON and
// capsules; the package (python/ferry) makes classes of them.
#include "python/binding/interpreter.h"

namespace {

PyMethodDef methods[] = {
    {"let_interpreter_end", ferry::python::let_interpreter_end, METH_NOARGS, nullptr},
    {"report", ferry::python::report, METH_VARARGS, nullptr},
    {"open_checkpoint", ferry::python::open_checkpoint, METH_VARARGS, nullptr},
    {"describe", ferry::python::describe, METH_VARARGS, nullptr},
    {"carried_file", ferry::python::carried_file, METH_VARARGS, nullptr},
    {"stream", ferry::python::stream, METH_VARARGS, nullptr},
    {"stream_tensors", ferry::python::stream_tensors, METH_VARARGS, nullptr},
    {"stream_next", ferry::python::stream_next, METH_VARARGS, nullptr},
    {"stream_start", ferry::python::stream_start, METH_VARARGS, nullptr},
    {"stream_wait", ferry::python::stream_wait, METH_VARARGS, nullptr},
    {"stream_release", ferry::python::stream_release, METH_VARARGS, nullptr},
    {"stream_close", ferry::python::stream_close, METH_VARARGS, nullptr},
    {"allocate", ferry::python::allocate, METH_VARARGS, nullptr},
    {"export_dlpack", ferry::python::export_dlpack, METH_VARARGS, nullptr},
    {"import_dlpack", ferry::python::import_dlpack, METH_VARARGS, nullptr},
    {"load_shards", ferry::python::load_shards, METH_VARARGS, nullptr},
    {"save_shards", ferry::python::save_shards, METH_VARARGS, nullptr},
    {"save_tensors", ferry::python::save_tensors, METH_VARARGS, nullptr},
    {"write_run_config", ferry::python::write_run_config, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "_ferry",
    "Checkpoints of Hugging Face and Megatron-Core.",
    -1,
    methods,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

// Python asks for this name.
// NOLINTNEXTLINE(bugprone-reserved-identifier,readability-identifier-naming)
PyMODINIT_FUNC PyInit__ferry() {
  auto* const module = PyModule_Create(&definition);
  if (module != nullptr) PyModule_AddStringConstant(module, "version", FERRY_VERSION);
  return module;
}
