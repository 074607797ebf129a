// Tensors in the memory of Python: filled from a checkpoint as the shards of a parallel model, and
// saved, as shards or whole.
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/report/json.h"
#include "converter/bridge/load.h"
#include "converter/bridge/memory_checkpoint.h"
#include "converter/bridge/save.h"
#include "converter/bridge/single_keys.h"
#include "converter/convert.h"
#include "distckpt/execute/memory_io.h"
#include "distckpt/plan/mesh_layout.h"
#include "python/binding/checkpoint.h"
#include "python/binding/interpreter.h"
#include "python/binding/options.h"

namespace ferry::python {
namespace {

using converter::Checkpoint;
using distckpt::Dims;
using nlohmann::json;

Dims dims(const json& list) {
  const auto values = list.get<std::vector<std::int64_t>>();
  return Dims(values);
}

distckpt::DType dtype_of(const json& tensor, const std::string& name) {
  const auto text = tensor.at("dtype").get<std::string>();
  const auto dtype = distckpt::dtype_from_torch(text);
  require(dtype.has_value(), ErrorKind::kUsage, "{}: {} is no dtype of a weight", name, text);
  return *dtype;
}

std::byte* address_of(const json& tensor) {
  return reinterpret_cast<std::byte*>(tensor.at("address").get<std::uintptr_t>());  // NOLINT
}

std::vector<distckpt::LocalShard> shards_of(const Options& options) {
  std::vector<distckpt::LocalShard> shards;
  for (const auto& one : options.json().at("shards")) {
    const auto key = one.at("key").get<std::string>();
    shards.push_back(
        {.tensor =
             distckpt::ShardedTensor{.key = key,
                                     .dtype = dtype_of(one, key),
                                     .local_shape = dims(one.at("local_shape")),
                                     .global_shape = dims(one.at("global_shape")),
                                     .global_offset = dims(one.at("global_offset")),
                                     .prepend_axis_num = one.at("prepend_axis_num").get<int>(),
                                     .replica_id = one.at("replica_id").get<std::vector<int>>()},
         .data = address_of(one),
         .strides = dims(one.at("strides"))});
  }
  return shards;
}

// The ranks of torch.distributed: gather(bytes) -> [bytes of every rank].
distckpt::RankGroup group_of(const Options& options, PyObject* gather, Caller& caller) {
  distckpt::RankGroup group{.rank = options.get<int>("rank"), .size = options.get<int>("size", 1)};
  if (group.size == 1) return group;
  group.all_gather_bytes = [gather, &caller, size = group.size](std::string_view mine) {
    std::vector<std::string> all;
    const bool done = caller.with_gil([&] {
      if (PyErr_Occurred() != nullptr) return false;
      const Reference result(
          PyObject_CallFunction(gather, "y#", mine.data(), static_cast<Py_ssize_t>(mine.size())));
      if (!result) return false;
      for (int i = 0; i < size; ++i) {
        const Reference one(PySequence_GetItem(result.get(), i));
        char* bytes = nullptr;
        Py_ssize_t length = 0;
        if (!one || PyBytes_AsStringAndSize(one.get(), &bytes, &length) != 0) return false;
        all.emplace_back(bytes, static_cast<std::size_t>(length));
      }
      return true;
    });
    if (!done) throw PythonError();
    return all;
  };
  return group;
}

std::vector<std::string> words(const std::vector<distckpt::NonZeroPadding>& padding) {
  std::vector<std::string> list;
  for (const auto& one : padding)
    list.push_back(fmt::format("{} {}", one.tensor, to_string(one.box)));
  return list;
}

json load_report(const Checkpoint& checkpoint,
                 const Options& options,
                 const distckpt::RankGroup& group,
                 const converter::ProgressFunction& progress) {
  const auto mesh = distckpt::gather_mesh_layout(group, shards_of(options));
  distckpt::MemorySink memory(mesh.layout);
  const auto limits = stream_options(options);
  const auto report = converter::load(checkpoint, mesh, memory,
                                      {.round = options.get<bool>("round"),
                                       .threads = limits.threads,
                                       .max_memory = limits.max_memory},
                                      progress);
  return {{"bytes", report.bytes},
          {"seconds", report.seconds},
          {"threads", report.threads},
          {"left_behind", report.left_behind},
          {"nonzero_padding", words(report.nonzero_padding)}};
}

json save_report(const Checkpoint& like,
                 const Options& options,
                 const distckpt::RankGroup& group,
                 const converter::ProgressFunction& progress) {
  const auto mesh = distckpt::gather_mesh_layout(
      group, converter::with_single_keys(like.map, shards_of(options)));
  distckpt::MemorySource memory(mesh.layout);
  const auto limits = stream_options(options);
  const auto report =
      converter::save(group, mesh, memory,
                      {.config = like.map.config,
                       .to = options.path("target"),
                       .iteration = options.iteration().value_or(distckpt::Iteration{}),
                       .parallel = options.parallel(),
                       .origin = &like,
                       .overwrite = options.get<bool>("overwrite"),
                       .prove = true,
                       .threads = limits.threads,
                       .max_memory = limits.max_memory},
                      progress);
  return {{"folder", report.folder.string()},
          {"bytes", report.bytes},
          {"seconds", report.seconds},
          {"proved", report.proved},
          {"proof_seconds", report.proof_seconds},
          {"model_digest", report.manifest ? report.manifest->model_digest : ""}};
}

// Runs a rank's part, load_report() or save_report(): (checkpoint, options as JSON, gather,
// progress or None) -> JSON.
PyObject* run_rank(PyObject* arguments, decltype(load_report)& run) {
  return guarded([&] {
    PyObject *capsule = nullptr, *gather = nullptr, *progress = nullptr;
    const char* options_json = nullptr;
    if (PyArg_ParseTuple(arguments, "OsOO", &capsule, &options_json, &gather, &progress) == 0)
      throw PythonError();
    const auto checkpoint = checkpoint_of(capsule);
    std::string report;
    Work work;
    work.run([&] {
      const Options options(options_json);
      report = run(*checkpoint, options, group_of(options, gather, work), reporter(progress, work))
                   .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);  // in paths
    });
    return text(report);
  });
}

}  // namespace

PyObject* load_shards(PyObject* /*self*/, PyObject* arguments) {
  return run_rank(arguments, load_report);
}

// The checkpoint is that which the model is like.
PyObject* save_shards(PyObject* /*self*/, PyObject* arguments) {
  return run_rank(arguments, save_report);
}

// save_tensors(the checkpoint that the model is like, options of convert as JSON, progress or None)
// -> the report of convert, as JSON
PyObject* save_tensors(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject *capsule = nullptr, *progress = nullptr;
    const char* options_json = nullptr;
    if (PyArg_ParseTuple(arguments, "OsO", &capsule, &options_json, &progress) == 0)
      throw PythonError();
    const auto like = checkpoint_of(capsule);
    std::string report;
    Work work;
    work.run([&] {
      const Options options(options_json);
      std::vector<converter::NamedMemory> tensors;
      for (const auto& one : options.json().at("tensors")) {
        const auto name = one.at("name").get<std::string>();
        tensors.push_back({.name = name,
                           .dtype = dtype_of(one, name),
                           .shape = dims(one.at("shape")),
                           .data = address_of(one)});
      }
      const auto memory = checkpoint_in_memory(*like, tensors);
      auto convert = convert_options(options);
      convert.memory = &memory;
      report = cli::json_text(
          cli::convert_json(converter::convert(convert, reporter(progress, work))), -1);
    });
    return text(report);
  });
}

}  // namespace ferry::python
