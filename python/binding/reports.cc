// The acts that end in a report: convert, verify, diff, digest, check, inspect.
#include "cli/report/json.h"
#include "converter/convert.h"
#include "converter/diff.h"
#include "converter/digest_checkpoint.h"
#include "converter/inspect.h"
#include "converter/verify.h"
#include "distckpt/storage/file_io.h"
#include "distckpt/storage/remote_tree.h"
#include "python/binding/interpreter.h"
#include "python/binding/options.h"

namespace ferry::python {
namespace {

std::string report_json(const std::string& act,
                        const Options& options,
                        const converter::ProgressFunction& progress) {
  if (act == "convert") {
    return cli::json_text(cli::convert_json(converter::convert(convert_options(options), progress)),
                          -1);
  }
  if (act == "convert_adapter") {
    const auto report = converter::convert_adapter(adapter_options(options), progress);
    return cli::json_text(cli::adapter_json(report), -1);
  }
  if (act == "verify") {
    return cli::json_text(cli::verify_json(converter::verify(
                              pair_options(options), options.get<bool>("weights_only"), progress)),
                          -1);
  }
  if (act == "diff")
    return cli::json_text(cli::diff_json(converter::diff(pair_options(options), progress)), -1);
  if (act == "digest")
    return write_manifest(converter::digest_checkpoint(digest_options(options), progress));
  if (act == "check") {
    const auto manifest = options.path("manifest");
    const auto expected =
        converter::parse_manifest(distckpt::read_text(manifest), manifest.string());
    auto digest = digest_options(options);
    digest.leave_out = {manifest};
    return cli::json_text(
        cli::check_json(converter::check_manifest(digest, expected, /*all_files=*/false, progress)),
        -1);
  }
  require(act == "inspect", ErrorKind::kBug, "{}: no such act", act);
  const auto report =
      converter::inspect(options.path("path"), options.iteration(), options.path("hf_config"));
  return cli::json_text(cli::inspect_json(report, options.get<std::string>("filter")), -1);
}

}  // namespace

// report(act, options as JSON, progress or None) -> JSON
PyObject* report(PyObject* /*self*/, PyObject* arguments) {
  return guarded([&] {
    const char* act = nullptr;
    const char* options = nullptr;
    PyObject* progress = nullptr;
    if (PyArg_ParseTuple(arguments, "ssO", &act, &options, &progress) == 0) throw PythonError();
    std::string json;
    {
      WithoutGil gil;
      distckpt::RemoteTree::instance().forget();
      json = report_json(act, Options(options), reporter(progress, gil));
    }
    return text(json);
  });
}

}  // namespace ferry::python
