// The acts that end in a report.
#include <algorithm>
#include <string>
#include <string_view>

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

using nlohmann::ordered_json;
using Progress = converter::ProgressFunction;

converter::DeltaChain chain_of(const Options& options) {
  return converter::DeltaChain(options.paths("deltas"));
}

ordered_json merge(const Options& options, const Progress& progress) {
  return cli::merge_json(
      converter::merge_adapter(changed_options(options), merged_adapter(options), progress));
}

ordered_json split(const Options& options, const Progress& progress) {
  const auto split = split_options(options);
  return cli::split_json(converter::split_adapter(split, progress), split.rank);
}

ordered_json delta_apply(const Options& options, const Progress& progress) {
  auto chain = chain_of(options);
  return cli::convert_json(converter::apply_delta(changed_options(options), chain, progress));
}

ordered_json delta_verify(const Options& options, const Progress& progress) {
  auto chain = chain_of(options);
  return cli::verify_delta_json(
      converter::verify_delta(verify_delta_options(options), chain, progress));
}

ordered_json delta_inspect(const Options& options, const Progress& /*progress*/) {
  auto json = ordered_json::array();
  for (const auto& delta : converter::open_deltas(options.path("delta")))
    json.push_back(cli::delta_json(delta->summary()));
  return json;
}

ordered_json check(const Options& options, const Progress& progress) {
  const auto manifest = options.path("manifest");
  const auto expected = converter::parse_manifest(distckpt::read_text(manifest), manifest.string());
  auto digest = digest_options(options);
  digest.leave_out = {manifest};
  return cli::check_json(
      converter::check_manifest(digest, expected, /*all_files=*/false, progress));
}

ordered_json inspect(const Options& options, const Progress& /*progress*/) {
  const auto report =
      converter::inspect(options.path("path"), options.iteration(), options.path("hf_config"));
  return cli::inspect_json(report, options.get<std::string>("filter"));
}

struct Act {
  std::string_view name{};
  ordered_json (*run)(const Options&, const Progress&) = nullptr;
};
constexpr Act kActs[] = {
    {"convert",
     [](const Options& options, const Progress& progress) {
       return cli::convert_json(converter::convert(convert_options(options), progress));
     }},
    {"convert_adapter",
     [](const Options& options, const Progress& progress) {
       return cli::adapter_json(converter::convert_adapter(adapter_options(options), progress));
     }},
    {"verify",
     [](const Options& options, const Progress& progress) {
       return cli::verify_json(
           converter::verify(pair_options(options), options.get<bool>("weights_only"), progress));
     }},
    {"diff",
     [](const Options& options, const Progress& progress) {
       return cli::diff_json(converter::diff(pair_options(options), progress));
     }},
    {"delta_make",
     [](const Options& options, const Progress& progress) {
       return cli::make_delta_json(converter::make_delta(make_delta_options(options), progress));
     }},
    {"merge", merge},
    {"split", split},
    {"delta_apply", delta_apply},
    {"delta_verify", delta_verify},
    {"delta_inspect", delta_inspect},
    {"check", check},
    {"inspect", inspect}};

std::string report_json(std::string_view name, const Options& options, const Progress& progress) {
  if (name == "digest")
    return write_manifest(converter::digest_checkpoint(digest_options(options), progress));
  const auto* act = std::ranges::find(kActs, name, &Act::name);
  require(act != std::end(kActs), ErrorKind::kBug, "{}: no such act", name);
  return cli::json_text(act->run(options, progress), -1);
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
    Work work;
    work.run([&] {
      distckpt::RemoteTree::instance().forget();
      json = report_json(act, Options(options), reporter(progress, work));
    });
    return text(json);
  });
}

}  // namespace ferry::python
