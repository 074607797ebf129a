// A checkpoint that was opened, and the streams that read its tensors.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/report/json.h"
#include "converter/bridge/tensor_stream.h"
#include "converter/families/megatron_args.h"
#include "converter/open/checkpoint.h"
#include "converter/write/run_config.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/storage/remote_tree.h"
#include "python/binding/checkpoint.h"
#include "python/binding/interpreter.h"
#include "python/binding/options.h"

namespace ferry::python {
namespace {

using converter::Checkpoint;
using converter::CheckpointParts;
using converter::TensorStream;
using nlohmann::ordered_json;

constexpr const char* kStream = "ferry.stream";

// A child of fork() has none of the threads that read: there it is left as it is.
struct EndInItsProcess {
  pid_t process = getpid();
  void operator()(TensorStream* stream) const {
    if (process == getpid()) delete stream;
  }
};

// Null after stream_close().
using StreamHolder = std::unique_ptr<TensorStream, EndInItsProcess>;

TensorStream& stream_of(PyObject* capsule) {
  const auto holder = unwrap<StreamHolder>(capsule, kStream);
  require(*holder != nullptr, ErrorKind::kUsage, "the stream is closed");
  require(holder->get_deleter().process == getpid(), ErrorKind::kUsage,
          "the tensors are read by another process, which this one was forked from");
  return **holder;
}

std::vector<std::int64_t> list(const distckpt::Dims& dims) {
  return {dims.begin(), dims.end()};
}

// Names need not be UTF-8.
std::vector<unsigned char> bytes_of(const std::filesystem::path& path) {
  const auto& text = path.native();
  return {text.begin(), text.end()};
}

ordered_json describe_json(const Checkpoint& checkpoint) {
  const auto args = checkpoint.common
                        ? converter::find_args(distckpt::common_dict(*checkpoint.common))
                        : std::nullopt;
  ordered_json described{
      {"path", bytes_of(checkpoint.location.folder)},
      {"format", to_string(checkpoint.location.format)},
      {"iteration", checkpoint.location.iteration
                        ? ordered_json(iteration_text(*checkpoint.location.iteration))
                        : ordered_json(nullptr)},
      // A root of several, and not the folder of this one, for which open() takes no iteration.
      {"is_chosen", checkpoint.location.iteration.has_value() &&
                        !converter::holds_checkpoint(checkpoint.location.root)},
      {"family", checkpoint.map.config.family},
      {"vocab_size", checkpoint.map.config.vocab_size},
      {"config", nullptr},
      {"files", ordered_json::array()},
      {"args", args ? converter::plain_args(*args) : ordered_json(nullptr)},
      {"bridge_layout", layout_name(converter::bridge_layout(checkpoint))},
      {"run_config_problem", nullptr},
      {"metadata", nullptr},
      {"tensors", ordered_json::array()}};
  if (const auto problem = run_config_problem(checkpoint, converter::bridge_layout(checkpoint)))
    described["run_config_problem"] = *problem;
  if (checkpoint.hf && !checkpoint.hf->carried.empty()) {
    described["config"] = checkpoint.hf->config_text();
    described["files"] = checkpoint.hf->carried;
  }
  if (checkpoint.hf && checkpoint.hf->headers.size() == 1)
    described["metadata"] = checkpoint.hf->headers.front().metadata;
  for (const auto& tensor : checkpoint.tensors) {
    if (tensor.role == distckpt::Role::kWeight || tensor.role == distckpt::Role::kDerived)
      described["tensors"].push_back({tensor.name, short_name(tensor.dtype), list(tensor.shape)});
  }
  return described;
}

converter::WantedTensors wanted_of(const Checkpoint& checkpoint, const Options& options) {
  if (const auto name = options.find<std::string>("name")) {
    std::optional<distckpt::Box> box;
    if (const auto ranges =
            options.find<std::vector<std::pair<std::int64_t, std::int64_t>>>("box")) {
      box.emplace();
      for (const auto& [begin, end] : *ranges) {
        require(begin <= end, ErrorKind::kUsage, "box: {}:{} ends before it begins", begin, end);
        box->offset.push_back(begin);
        box->size.push_back(end - begin);
      }
    }
    return box_of_tensor(checkpoint, *name, box);
  }
  const auto names = options.get<std::string>("names");
  if (names == "hf") return whole_tensors(checkpoint, options.selection());
  require(names == "megatron", ErrorKind::kUsage, "names={}: is neither hf nor megatron", names);
  return tensors_of_rank(checkpoint, options.parallel(), options.get<int>("rank"),
                         options.selection());
}

PyObject* range_or_none(const std::optional<TensorStream::Range>& range) {
  if (!range) {
    Py_IncRef(Py_None);
    return Py_None;
  }
  return Py_BuildValue("nn", static_cast<Py_ssize_t>(range->begin),
                       static_cast<Py_ssize_t>(range->end));
}

}  // namespace

// open_checkpoint(options as JSON) -> capsule
PyObject* open_checkpoint(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    const char* options_json = nullptr;
    if (PyArg_ParseTuple(arguments, "s", &options_json) == 0) throw PythonError();
    std::shared_ptr<Checkpoint> checkpoint;
    Work().run([&] {
      const Options options(options_json);
      distckpt::RemoteTree::instance().forget();  // what it found before
      if (options.get<bool>("is_file")) {
        const auto files = std::make_shared<distckpt::SourceFiles>();
        const distckpt::NotedFiles noted(*files);
        checkpoint = std::make_shared<Checkpoint>(converter::open_file(options.path("path")));
        checkpoint->files = files;
        return;
      }
      checkpoint = std::make_shared<Checkpoint>(converter::open(
          options.path("path"), {.iteration = options.iteration(),
                                 .hf_config = options.path("hf_config"),
                                 .keep_quantized = options.get<bool>("keep_quantized")}));
      check_derived(*checkpoint);
    });
    return wrap(std::make_shared<const CheckpointParts>(std::move(checkpoint)), kCheckpoint);
  });
}

// describe(checkpoint) -> JSON
PyObject* describe(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject* capsule = nullptr;
    if (PyArg_ParseTuple(arguments, "O", &capsule) == 0) throw PythonError();
    const auto checkpoint = checkpoint_of(capsule);
    std::string described;
    Work().run([&] { described = cli::json_text(describe_json(*checkpoint), -1); });
    return text(described);
  });
}

// carried_file(checkpoint, name) -> bytes
PyObject* carried_file(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject* capsule = nullptr;
    const char* name = nullptr;
    if (PyArg_ParseTuple(arguments, "Os", &capsule, &name) == 0) throw PythonError();
    const auto checkpoint = checkpoint_of(capsule);
    std::string content;
    Work().run([&] {
      require(checkpoint->hf && std::ranges::count(checkpoint->hf->carried, name) > 0,
              ErrorKind::kNotFound, "{}: the checkpoint carries no such file", name);
      content = checkpoint->hf->text(name);
    });
    return PyBytes_FromStringAndSize(content.data(), static_cast<Py_ssize_t>(content.size()));
  });
}

// write_run_config(checkpoint, Hugging Face model or "") -> path
PyObject* write_run_config(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject* capsule = nullptr;
    const char* hf_model_id = nullptr;
    if (PyArg_ParseTuple(arguments, "Os", &capsule, &hf_model_id) == 0) throw PythonError();
    const auto checkpoint = checkpoint_of(capsule);
    std::string path;
    {
      const WithoutGil gil;
      path = converter::write_run_config(*checkpoint, hf_model_id).string();
    }
    return text(path);
  });
}

// stream(checkpoint, options as JSON) -> capsule
PyObject* stream(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject* capsule = nullptr;
    const char* options_json = nullptr;
    if (PyArg_ParseTuple(arguments, "Os", &capsule, &options_json) == 0) throw PythonError();
    const auto parts = unwrap<const CheckpointParts>(capsule, kCheckpoint);
    std::shared_ptr<StreamHolder> holder;
    Work().run([&] {
      const Options options(options_json);
      const auto name = options.find<std::string>("name");
      const auto checkpoint = name ? parts->part_with(*name) : parts->whole();
      holder = std::make_shared<StreamHolder>(
          new TensorStream(checkpoint, wanted_of(*checkpoint, options), stream_options(options)));
    });
    return wrap(std::move(holder), kStream);
  });
}

// stream_tensors(stream) -> JSON: [[name, dtype, shape, bytes], ...]
PyObject* stream_tensors(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject* capsule = nullptr;
    if (PyArg_ParseTuple(arguments, "O", &capsule) == 0) throw PythonError();
    auto listed = ordered_json::array();
    for (const auto& tensor : stream_of(capsule).tensors()) {
      listed.push_back(
          {tensor.name, short_name(tensor.dtype), list(tensor.shape), tensor.num_bytes()});
    }
    return text(cli::json_text(listed, -1));
  });
}

// stream_next(stream) -> (begin, end) of the tensors to be started, or None
PyObject* stream_next(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject* capsule = nullptr;
    if (PyArg_ParseTuple(arguments, "O", &capsule) == 0) throw PythonError();
    return range_or_none(stream_of(capsule).next_batch());
  });
}

// stream_start(stream, addresses)
PyObject* stream_start(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject* capsule = nullptr;
    PyObject* addresses = nullptr;
    if (PyArg_ParseTuple(arguments, "OO", &capsule, &addresses) == 0) throw PythonError();
    std::vector<std::byte*> memory;
    for (Py_ssize_t i = 0; i < PySequence_Size(addresses); ++i) {
      const Reference address(checked(PySequence_GetItem(addresses, i)));
      memory.push_back(
          reinterpret_cast<std::byte*>(PyLong_AsUnsignedLongLong(address.get())));  // NOLINT
    }
    if (PyErr_Occurred() != nullptr) throw PythonError();
    auto& stream = stream_of(capsule);
    {
      const WithoutGil gil;
      stream.start(std::move(memory));
    }
    Py_IncRef(Py_None);
    return Py_None;
  });
}

// stream_wait(stream, progress or None) -> (begin, end) of the tensors that are there, or None
PyObject* stream_wait(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject* capsule = nullptr;
    PyObject* progress = nullptr;
    if (PyArg_ParseTuple(arguments, "OO", &capsule, &progress) == 0) throw PythonError();
    auto& stream = stream_of(capsule);
    std::optional<TensorStream::Range> range;
    {
      WithoutGil gil;
      range = stream.wait(reporter(progress, gil));
    }
    return range_or_none(range);
  });
}

// stream_release(stream, begin, end)
PyObject* stream_release(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject* capsule = nullptr;
    Py_ssize_t begin = 0;
    Py_ssize_t end = 0;
    if (PyArg_ParseTuple(arguments, "Onn", &capsule, &begin, &end) == 0) throw PythonError();
    stream_of(capsule).release(
        {.begin = static_cast<std::size_t>(begin), .end = static_cast<std::size_t>(end)});
    Py_IncRef(Py_None);
    return Py_None;
  });
}

// stream_close(stream): ends what is being read, after which its memory may go
PyObject* stream_close(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    PyObject* capsule = nullptr;
    if (PyArg_ParseTuple(arguments, "O", &capsule) == 0) throw PythonError();
    const auto holder = unwrap<StreamHolder>(capsule, kStream);
    {
      const WithoutGil gil;
      holder->reset();
    }
    Py_IncRef(Py_None);
    return Py_None;
  });
}

}  // namespace ferry::python
